"""Reads and writes tensors in an unnamed file that is deleted with its process."""

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.storage.disk_space import reserve
from tandem.types import RunError


class TensorFile:
    """An unnamed file in ``folder``, of ``size`` bytes. ``failed(reason)``: returns the error to raise if the folder has no room or the
    disk fails."""

    def __init__(self, folder: Path, failed: Callable[[str], RunError], size: int = 0) -> None:
        self.size, self._failed = 0, failed
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this
        try:
            self.grow(size)
        except RunError:
            self._file.close()
            raise

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def grow(self, size: int) -> None:
        """Allocates the file up to ``size`` bytes; new bytes are 0."""
        if size > self.size:
            try:
                reserve(self.descriptor, size)
            except OSError as error:
                raise self._failed(str(error.strerror)) from None
            self.size = size

    def read(self, tensor: Tensor, at: int) -> None:
        """Fills the contiguous ``tensor`` from byte ``at`` on."""
        self._transfer(lambda left, place: os.preadv(self.descriptor, [left], place), tensor, at)

    def write(self, tensor: Tensor, at: int) -> None:
        """Writes the contiguous ``tensor`` to byte ``at``."""
        self._transfer(lambda left, place: os.pwrite(self.descriptor, left, place), tensor, at)

    def close(self) -> None:
        self._file.close()

    def _transfer(self, call: Callable[[Any, int], int], tensor: Tensor, at: int) -> None:
        left = bytes_view(tensor)
        while left:
            try:
                done = call(left, at)
            except OSError as error:
                raise self._failed(str(error.strerror)) from None
            if not done:
                raise self._failed(os.strerror(errno.EIO))
            left, at = left[done:], at + done


def file_tensor(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros backed by an unnamed file in ``folder``, whose pages the system can reclaim. Raises ``RunError`` if the
    folder has no room."""
    size = max(1, math.prod(shape)) * dtype.itemsize

    def failed(reason: str) -> RunError:
        return RunError(f"'{folder}' cannot hold a tensor of {size / 2**20:,.0f} MiB: {reason}; make room, or name another folder in 'trainer.offload_folder'")

    file = TensorFile(folder, failed, size)
    view = mmap.mmap(file.descriptor, size)
    file.close()
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)
