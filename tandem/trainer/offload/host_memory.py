"""Host memory for what leaves a GPU: page-locked, so that copies are asynchronous and run at the bus's full speed."""

import torch
from torch import Tensor

from tandem.types import RunError


def host_zeros(numbers: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Returns zeros in host memory. ``pinned``: page-locked; registered instead of taken from torch's pinned allocator, which rounds up to a
    power of two. Raises ``RunError`` if the memory cannot be pinned."""
    zeros = torch.zeros(numbers, dtype=dtype, device="cpu")
    if pinned and zeros.nbytes:
        failed = int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0))
        if failed:
            raise RunError(
                f"{zeros.nbytes / 2**30:.2f} GiB of host memory cannot be pinned for a GPU (CUDA error {failed}); raise 'ulimit -l', or set "
                "trainer.offload to none and residents.to to disk"
            )
    return zeros


def unpin(zeros: Tensor) -> None:
    """Makes memory of ``host_zeros`` ordinary memory, which may be freed."""
    if zeros.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(zeros.data_ptr())
