"""The arithmetic. ``select`` names the set of kernels that a device, a dtype and a machine allow."""

from typing import Literal

import torch

from tandem.kernels.api import (
    BLOCK_TOKENS,
    Kernels,
    KVLayer,
    PackedGroups,
    PackedWeight,
    PagedBatch,
    Routing,
    SampledRows,
    TokenLogprobs,
    empty_cache,
)
from tandem.kernels.kv_dtype import stored_dtype
from tandem.kernels.quantized import PackedQuantized, QuantizedWeight

KernelChoice = Literal["auto", "cpu", "reference"]

__all__ = [
    "BLOCK_TOKENS",
    "KVLayer",
    "KernelChoice",
    "Kernels",
    "PackedGroups",
    "PackedQuantized",
    "PackedWeight",
    "PagedBatch",
    "QuantizedWeight",
    "Routing",
    "SampledRows",
    "TokenLogprobs",
    "empty_cache",
    "select",
    "stored_dtype",
]


def select(choice: KernelChoice = "auto", dtype: torch.dtype = torch.float32) -> Kernels:
    """The kernels for ``choice``. ``auto`` takes the C++ kernels for fp32 where they can be built (and says in the log
    why not otherwise), else the reference. Raises ``UserError`` where ``cpu`` is asked for and cannot be had."""
    from tandem.kernels import reference

    if choice == "reference" or (choice == "auto" and dtype != torch.float32):
        return reference.ReferenceKernels()
    from tandem.kernels import cpu

    return cpu.load() if choice == "cpu" else cpu.load_or_none() or reference.ReferenceKernels()
