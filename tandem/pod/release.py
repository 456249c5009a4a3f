"""Gives memory that a process has freed back to the machine, so that the other sidecar can have it."""

import gc

import torch

from tandem.runtime.machine.heap import give_back


def release(device: torch.device) -> None:
    """Frees Python's garbage, the free lists of the C library and, on a GPU, the blocks that torch's allocator keeps."""
    gc.collect()
    give_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()
