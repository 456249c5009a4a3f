"""The bytes of tensors without numpy, which a plain installation does not have."""

import ctypes

from torch import Tensor


def bytes_view(tensor: Tensor) -> memoryview:
    """Returns the bytes of the contiguous ``tensor`` in host memory, which must outlive the view. (``Tensor.numpy`` would make its storage impossible to
    free.)"""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
