"""The arithmetic. ``select`` returns the kernels for a device, a dtype and a machine."""

from typing import Literal

import torch

from tandem.kernels.api import (
    BLOCK_TOKENS,
    CacheLayer,
    Kernels,
    KVLayer,
    LatentLayer,
    PackedGroups,
    PackedWeight,
    PagedBatch,
    Routing,
    SampledRows,
    TokenLogprobs,
    empty_cache,
)
from tandem.kernels.kv_dtype import stored_dtype
from tandem.kernels.latent_cache import empty_latent_cache
from tandem.kernels.quantized import PackedQuantized, QuantizedWeight

KernelChoice = Literal["auto", "cpu", "reference", "triton"]

__all__ = [
    "BLOCK_TOKENS",
    "CacheLayer",
    "KVLayer",
    "KernelChoice",
    "Kernels",
    "LatentLayer",
    "PackedGroups",
    "PackedQuantized",
    "PackedWeight",
    "PagedBatch",
    "QuantizedWeight",
    "Routing",
    "SampledRows",
    "TokenLogprobs",
    "empty_cache",
    "empty_latent_cache",
    "select",
    "stored_dtype",
    "why_reference",
]


def select(
    choice: KernelChoice = "auto", dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", deterministic: bool = True,
    attention: str = "auto",
) -> Kernels:
    """Returns the kernels for ``choice``. ``auto`` selects the C++ kernels for fp32 on a CPU if they can be built, and Triton's on a CUDA
    device if they are installed (else it logs why not), otherwise the reference. ``deterministic``: guarantees the invariance law of
    ``api``, which only kernels on a CUDA device can relax. ``attention``: ``auto`` is their own, else packed attention of another package
    (``attention_backends``). Raises ``UserError`` if a requested ``cpu``, ``triton`` or ``attention`` is unavailable."""
    kernels = _select(choice, dtype, torch.device(device).type == "cuda", deterministic)
    if attention == "auto":
        return kernels
    from tandem.kernels.attention_backends import check_device, load_backend, with_attention

    load_backend(attention)
    check_device(attention, torch.device(device))
    return with_attention(kernels, attention, dtype, torch.device(device), deterministic)


def why_reference(choice: KernelChoice, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why ``select`` took the reference for ``auto``, where faster kernels exist for ``device`` and ``dtype``, or for fp32 in place of a 16-bit
    ``dtype``; empty if it did not."""
    if choice != "auto" or kernels.name != "reference":
        return ""
    if device.type == "cuda":
        from tandem.kernels import triton

        why = f"kernels triton: {triton.missing()}" if dtype != torch.float64 else ""
    elif dtype in (torch.bfloat16, torch.float16):
        given, instead = ("float16", "float32") if dtype == torch.float16 else ("bfloat16", "float32 with precision bf16")
        return f"kernels cpu compute in float32 and not in {given}; using torch's products (kernels reference), which are slow: {instead} is faster"
    else:
        from tandem.kernels import cpu

        why = cpu.why_unavailable() if dtype == torch.float32 else ""
    return f"{why}; using kernels reference, which are slower" if why else ""


def _select(choice: KernelChoice, dtype: torch.dtype, on_gpu: bool, deterministic: bool) -> Kernels:
    from tandem.kernels import reference

    plain = reference.ReferenceKernels(tiled=False if on_gpu and not deterministic else None)
    if choice == "triton" or (choice == "auto" and on_gpu and dtype != torch.float64):
        from tandem.kernels import triton

        return triton.load(deterministic) if choice == "triton" else triton.load_or_none(deterministic) or plain
    if choice == "reference" or (choice == "auto" and (on_gpu or dtype != torch.float32)):
        return plain
    from tandem.kernels import cpu

    return cpu.load() if choice == "cpu" else cpu.load_or_none() or plain
