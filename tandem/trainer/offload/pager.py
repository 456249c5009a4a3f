"""Stores tensors in a file and brings them to memory piece by piece, the next piece while the current one is processed."""

import mmap
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tandem.trainer.offload.tensor_file import TensorFile
from tandem.types import RunError

PIECE = 1 << 20
"""Elements of a tensor in memory at a time. A multiple of any vector width, so only the last piece of a tensor has a remainder."""


class Pager:
    """Flat tensors of ``sizes`` elements and one ``dtype``, initially zero, in one unnamed file in ``folder`` that is deleted with the
    process. Two staging buffers hold a piece of each of ``at_once`` tensors; ``pinned``: page-locked, for copies to and from a GPU.

    Raises ``RunError`` if the folder has no room; the space is allocated at once, so that no later step can run out of it."""

    def __init__(self, folder: Path, sizes: Sequence[int], dtype: torch.dtype, at_once: int, pinned: bool = False) -> None:
        self._sizes, self._dtype, self._folder = list(sizes), dtype, folder
        self._starts = [sum(self._sizes[:i]) * dtype.itemsize for i in range(len(self._sizes))]
        self._bytes = sum(self._sizes) * dtype.itemsize
        self._file = TensorFile(folder, self._failed, self._bytes)
        longest = min(PIECE, max(self._sizes, default=0))
        self._buffers = [[torch.empty(longest, dtype=dtype, device="cpu", pin_memory=pinned) for _ in range(at_once)] for _ in range(2)]
        # A single thread: a buffer's write is done before the next read into it.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pager")

    @property
    def staging_bytes(self) -> int:
        return sum(buffer.nbytes for side in self._buffers for buffer in side)

    def visit(self, groups: Sequence[Sequence[int]], work: Callable[[int, slice, list[Tensor]], None], kept: Collection[int] = ()) -> None:
        """Calls ``work(g, where, pieces)`` for every piece of every group of tensors of equal size.

        ``pieces``: those tensors' elements in the slice ``where``, which ``work`` changes in place. The next piece is read ahead, and
        processed pieces are written back, except those of the tensors in ``kept``."""
        pieces = [
            (g, slice(start, min(start + PIECE, self._sizes[group[0]])))
            for g, group in enumerate(groups)
            for start in range(0, self._sizes[group[0]], PIECE)
        ]
        reads = [self._begin_stage(groups[g], where, turn % 2) for turn, (g, where) in enumerate(pieces[:2])]
        writes: list[Future[None]] = []
        for turn, (g, where) in enumerate(pieces):
            staged = reads[turn].result()
            work(g, where, staged)
            back = [(index, piece) for index, piece in zip(groups[g], staged, strict=True) if index not in kept]
            writes.append(self._worker.submit(self._transfer, self._file.write, [index for index, _ in back], where, [piece for _, piece in back]))
            if turn + 2 < len(pieces):
                after, there = pieces[turn + 2]
                reads.append(self._begin_stage(groups[after], there, turn % 2))
        for write in writes:
            write.result()

    def mapped(self, index: int) -> Tensor:
        """Returns tensor ``index`` as a view of the file, read on access."""
        if not self._sizes[index]:
            return torch.empty(0, dtype=self._dtype)
        view = mmap.mmap(self._file.descriptor, self._bytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(view, dtype=self._dtype, count=self._sizes[index], offset=self._starts[index])

    def write(self, index: int, values: Tensor, first: int = 0) -> None:
        """Writes ``values`` to tensor ``index`` from its element ``first`` on."""
        flat = values.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            piece = flat[start : start + PIECE].to(self._dtype).contiguous()
            self._transfer(self._file.write, [index], slice(first + start, first + start + piece.numel()), [piece])

    def begin_read(self, index: int, out: Tensor, first: int = 0) -> "Future[None]":
        """Starts to fill the contiguous tensor ``out`` with the elements of tensor ``index`` from ``first`` on."""
        return self._worker.submit(self._transfer, self._file.read, [index], slice(first, first + out.numel()), [out])

    def begin_write(self, index: int, values: Tensor, first: int = 0, *, adds: bool = False) -> "Future[None]":
        """Starts to write the contiguous tensor ``values``, which the pager owns from now on, to tensor ``index`` from ``first`` on.
        ``adds``: adds it to the stored values."""
        return self._worker.submit(self._put, index, values.view(-1), first, adds)

    def _put(self, index: int, values: Tensor, first: int, adds: bool) -> None:
        # Runs in the worker thread after all earlier requests, so the staging buffer is free.
        held = self._buffers[0][0]
        for start in range(0, values.numel() if adds else 0, held.numel()):
            piece = values[start : start + held.numel()]
            before = held[: piece.numel()]
            self._transfer(self._file.read, [index], slice(first + start, first + start + piece.numel()), [before])
            piece.add_(before)
        self._transfer(self._file.write, [index], slice(first, first + values.numel()), [values])

    def close(self) -> None:
        self._worker.shutdown()
        self._file.close()

    def _begin_stage(self, group: Sequence[int], where: slice, side: int) -> "Future[list[Tensor]]":
        staged = [buffer[: where.stop - where.start] for buffer in self._buffers[side][: len(group)]]

        def read() -> list[Tensor]:
            self._transfer(self._file.read, group, where, staged)
            return staged

        return self._worker.submit(read)

    def _transfer(self, call: Callable[[Tensor, int], None], group: Sequence[int], where: slice, tensors: Sequence[Tensor]) -> None:
        """Calls ``call`` with every tensor and the byte offset of its slice in the file."""
        for index, tensor in zip(group, tensors, strict=True):
            call(tensor, self._starts[index] + where.start * self._dtype.itemsize)

    def _failed(self, reason: str) -> RunError:
        return RunError(
            f"'{self._folder}' cannot hold the {self._bytes / 2**20:,.0f} MiB of offloaded state: {reason}; make room, or name "
            "another folder in 'trainer.offload_folder'"
        )
