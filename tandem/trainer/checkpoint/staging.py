"""The staged copy of a rank's state: one block of memory with the layout of the rank's file, reused by every save."""

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tandem.trainer.checkpoint.format.rank_file import Layout, lay_out
from tandem.trainer.checkpoint.format.shard import Piece, Shard, piece_of
from tandem.trainer.offload.tensor_file import TensorFile
from tandem.types import RunError


class Staging:
    """Memory for the file of ``pieces``.

    ``pinned``: page-locked, for full-speed copies from a GPU. ``folder``: the copy is mapped to a file there, whose pages the system can
    reclaim. Raises ``RunError`` if the folder has no room."""

    def __init__(self, pieces: Sequence[Piece], pinned: bool, folder: Path | None = None) -> None:
        self.pieces = tuple(pieces)
        self.layout: Layout = lay_out(pieces)
        self._file: TensorFile | None = None
        size = self.layout.size
        if pinned and folder is None:
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._view = memoryview((ctypes.c_char * size).from_address(self._bytes.data_ptr())).cast("B")
        else:
            self._memory = self._mapped(size, folder)
            self._view = memoryview(self._memory)
            self._bytes = torch.frombuffer(self._view, dtype=torch.uint8)
        header = self.layout.header
        self._view[: len(header)] = header
        self._tensors: dict[object, Tensor] = {}
        for piece, offset in self.layout.placed:
            part = self._bytes[offset : offset + piece.nbytes].view(getattr(torch, piece.dtype)).view(piece.offsets.shape)
            self._tensors[(piece.key, piece.offsets)] = part

    def _mapped(self, size: int, folder: Path | None) -> mmap.mmap:
        if folder is not None:
            self._file = TensorFile(folder, lambda reason: _no_room(folder, size, reason), size)
            return mmap.mmap(self._file.descriptor, size)
        # A private mapping with huge pages where available: touching memory for the first time costs more than the copy.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def touch(self) -> None:
        """Touches every page, so that the first save does not pay for page faults."""
        if self._file is not None:
            return
        zeros = bytes(1 << 20)
        for start in range(len(self.layout.header), self.layout.size, len(zeros)):
            stop = min(start + len(zeros), self.layout.size)
            self._view[start:stop] = zeros[: stop - start]

    def fits(self, shards: Sequence[Shard]) -> bool:
        """Returns whether the layout is that of ``shards``."""
        return self.pieces == tuple(map(piece_of, shards))

    @torch.no_grad()
    def fill(self, shards: Sequence[Shard]) -> None:
        """Copies ``shards`` here; they may change again once it returns."""
        for shard in shards:
            self._tensors[(shard.key, shard.offsets)].copy_(shard.tensor, non_blocking=True)
        if any(shard.tensor.is_cuda for shard in shards):
            torch.cuda.current_stream().synchronize()

    def release_pages(self) -> None:
        """Releases the pages of a file-backed copy until they are accessed again."""
        if self._file is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)

    @property
    def content(self) -> memoryview:
        """The bytes of the file."""
        return self._view


def _no_room(folder: Path, size: int, reason: str) -> RunError:
    return RunError(
        f"'{folder}' cannot hold the {size / 2**20:,.0f} MiB of a checkpoint's copy: {reason}; make room, or name another folder in "
        "'trainer.offload_folder'"
    )
