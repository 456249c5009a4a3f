"""Memory of weights in large pages: a decoding step reads each weight once, and with pages of 4 KiB the processor looks up every page and stops
reading ahead at its end."""

import ctypes
import itertools
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
LINE_BYTES = 64
SMALLEST_BYTES = 2 * PAGE_BYTES
"""Of a smaller weight less than half would be in whole large pages."""


def weight_memory(size_bytes: int) -> Tensor:
    """Returns ``size_bytes`` uninitialised bytes, from a large page on where there are several; a system without large pages ignores the hint."""
    advise, advice = _madvise(), getattr(mmap, "MADV_HUGEPAGE", None)
    if size_bytes < SMALLEST_BYTES or advise is None or advice is None:
        return torch.empty(size_bytes, dtype=torch.uint8)
    whole = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE_BYTES
    memory = whole[first : first + size_bytes]
    advise(memory.data_ptr(), size_bytes // mmap.PAGESIZE * mmap.PAGESIZE, advice)
    return memory


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of ``tensors`` that lie behind each other in large pages, each from a cache line on; where all of them are too small for that,
    themselves."""
    sizes = [-(-tensor.nbytes // LINE_BYTES) * LINE_BYTES for tensor in tensors]
    if sum(sizes) < SMALLEST_BYTES:
        return list(tensors)
    memory = weight_memory(sum(sizes))
    starts = itertools.accumulate(sizes, initial=0)
    return [memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor) for at, tensor in zip(starts, tensors, strict=False)]


@cache
def _madvise() -> Any:
    """Returns the C function, ``None`` where there is none."""
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function
