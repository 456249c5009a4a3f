"""Shared by all launches: tensor checks and device properties."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Fixed when triton is imported, because programs are made either for the interpreter or for the compiler."""
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}
"""Compile options of programs whose rounding must not depend on instruction fusion."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}
"""What programs call the dtypes of a cache of codes (``CODES``); 0: it has values."""


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def dense(x: Tensor) -> Tensor:
    """Returns ``x`` in contiguous memory, detached."""
    return x.detach().contiguous()


def stored_bytes(tensor: Tensor) -> Tensor:
    """Returns e4m3 as bytes: the programs decode it themselves, also on devices without that type."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def places(sequences: int, tokens: int, group: int, rows: int) -> int:
    """Returns the maximum number of tiles of ``rows`` rows: one more per sequence than the rows fill (see ``sequence_of``)."""
    group_rows = power_of_two(group)
    return tokens // (max(rows, group_rows) // group_rows) + sequences


def check(name: str, x: Tensor, *shape: int | None) -> None:
    """Raises for an ``x`` of another shape (``None``: any length), of an unsupported dtype, or on an unsupported device."""
    if x.dim() != len(shape) or any(want is not None and have != want for have, want in zip(x.shape, shape, strict=True)):
        asked = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{asked}]")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}; the Triton kernels take float32, bfloat16 and float16")
    if not (x.is_cuda or IS_INTERPRETED):
        raise TypeError(f"{name} is on {x.device}; the Triton kernels take tensors on a CUDA device")


@cache
def processors(device: torch.device) -> int:
    """Returns the multiprocessors of a CUDA device; 2 in the interpreter, so that programs process several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
