"""What every launch needs: checked tensors, and the facts of the device."""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Fixed when triton is imported: its programs are made for the one or the other."""
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}
"""Compile options of programs whose rounding must not depend on what the compiler merges."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def dense(x: Tensor) -> Tensor:
    """``x`` side by side in memory, without its history."""
    return x.detach().contiguous()


def check(name: str, x: Tensor, *shape: int | None) -> None:
    """Raise for an ``x`` of another shape (``None``: any length), of a dtype that has no kernel, or on a device that has none."""
    if x.dim() != len(shape) or any(want is not None and have != want for have, want in zip(x.shape, shape, strict=True)):
        asked = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [{asked}]")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}; the Triton kernels take float32, bfloat16 and float16")
    if not (x.is_cuda or IS_INTERPRETED):
        raise TypeError(f"{name} is on {x.device}; the Triton kernels take tensors on a CUDA device")


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 in the interpreter, so that programs walk several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
