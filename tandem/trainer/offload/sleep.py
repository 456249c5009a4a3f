"""Offloads tensors that are not in use to host memory or to a file, and restores them: the training state of a pod during a rollout."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.trainer.offload.host_memory import host_zeros, unpin
from tandem.trainer.offload.streams import streams_of
from tandem.trainer.offload.tensor_file import TensorFile
from tandem.types import RunError

ALIGNMENT_BYTES = 4096
CPU = torch.device("cpu")
STAGED_BYTES = 16 << 20
"""The buffer between a GPU and a file."""


class Moved(NamedTuple):
    """The bytes written or read, and the ``seconds`` it took."""

    size_bytes: int = 0
    seconds: float = 0.0


class Place(Protocol):
    """Where offloaded bytes are stored, by their offset."""

    def grow(self, size: int) -> None:
        """Makes room for ``size`` bytes in all. Raises ``RunError`` if there is none."""
        ...

    def read(self, content: Tensor, at: int) -> None:
        """Fills ``content[n]`` uint8, on any device, from byte ``at`` on; returns when it is done."""
        ...

    def write(self, content: Tensor, at: int) -> None:
        """Stores ``content[n]`` uint8, on any device, at byte ``at``; returns when it is done."""
        ...

    def close(self) -> None: ...


class FilePlace:
    """An unnamed file in ``folder``. ``staging``: a page-locked buffer that the bytes of a GPU pass through (``None``: content is in host
    memory)."""

    def __init__(self, folder: Path, staging: Tensor | None = None) -> None:
        self._file = TensorFile(folder, lambda reason: RunError(
            f"'{folder}' cannot hold the trainer's state during the rollout: {reason}; make room, name another folder in 'trainer.offload_folder', or "
            "set trainer.sleep_offload to none"
        ))  # fmt: skip
        self._staging = staging

    def grow(self, size: int) -> None:
        self._file.grow(size)

    def read(self, content: Tensor, at: int) -> None:
        if self._staging is None:
            self._file.read(content, at)
            return
        for piece, staged, start in self._pieces(content, at, self._staging):
            self._file.read(staged, start)
            piece.copy_(staged)

    def write(self, content: Tensor, at: int) -> None:
        if self._staging is None:
            self._file.write(content, at)
            return
        for piece, staged, start in self._pieces(content, at, self._staging):
            staged.copy_(piece)
            self._file.write(staged, start)

    def close(self) -> None:
        self._file.close()
        if self._staging is not None:
            unpin(self._staging)

    @staticmethod
    def _pieces(content: Tensor, at: int, staging: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yields each piece of ``content`` that ``staging`` holds at once, its part of ``staging``, and its byte in the file."""
        for piece in content.split(len(staging)):
            yield piece, staging[: len(piece)], at
            at += len(piece)


class HostPlace:
    """Host memory, which is allocated once and reused. ``pinned``: page-locked, for full-speed copies from a GPU."""

    def __init__(self, pinned: bool) -> None:
        self._is_pinned, self._size = pinned, 0
        self._blocks: list[tuple[int, Tensor]] = []

    def grow(self, size: int) -> None:
        if size > self._size:
            self._blocks.append((self._size, host_zeros(size - self._size, torch.uint8, self._is_pinned)))
            self._size = size

    def read(self, content: Tensor, at: int) -> None:
        for part, held in self._overlaps(content, at):
            part.copy_(held)

    def write(self, content: Tensor, at: int) -> None:
        for part, held in self._overlaps(content, at):
            held.copy_(part)

    def close(self) -> None:
        for _, block in self._blocks:
            unpin(block)
        self._blocks.clear()
        self._size = 0

    def _overlaps(self, content: Tensor, at: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each part of ``content`` at byte ``at`` that lies in one block, with the block's part."""
        for start, block in self._blocks:
            first, last = max(at, start), min(at + len(content), start + len(block))
            if first < last:
                yield content[first - at : last - at], block[first - start : last - start]


class _Moving(NamedTuple):
    storage: torch.UntypedStorage
    size_bytes: int
    at: int


class SleepOffload:
    """Offloads the storages of tensors to ``place`` and frees their memory until they are loaded again.

    A storage is moved once, however many tensors and views share it. After ``onload`` each tensor has the same bits as before; until then
    it has no memory and must not be read. Only memory of ``device`` is moved, and none that torch does not own (a mapped file)."""

    def __init__(self, place: Place, device: torch.device = CPU) -> None:
        self._place, self._device = place, device
        self._streams = streams_of(self._device)
        # A thread begins on GPU 0, where it would make a context of this process.
        on_own_gpu = partial(torch.cuda.set_device, self._device) if self._device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "sleep-offload", on_own_gpu)
        self._moved: dict[int, _Moving] = {}
        self._end = 0
        self._writing: list[Future[Moved]] = []

    def begin_offload(self, tensors: Iterable[Tensor]) -> int:
        """Starts to write the storages of ``tensors`` that are not offloaded yet, in a thread that frees each once it is written. Returns
        their bytes. Raises ``RunError`` if there is no room for them."""
        moving = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or storage._cdata in self._moved or not storage.resizable() or storage.device.type != self._device.type:
                continue
            one = _Moving(storage, size, self._end)
            self._moved[storage._cdata] = one
            moving.append(one)
            self._end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._place.grow(self._end)
        if moving:
            # The update that was launched last must be done before its results are copied.
            self._streams.wait("device_to_host", self._streams.record_event("compute"))
            self._writing.append(self._thread.submit(self._write, moving))
        return sum(one.size_bytes for one in moving)

    def wait(self) -> Moved:
        """Waits for all writes. Returns what was written since the last ``wait``; raises ``RunError`` if the disk failed."""
        moved, self._writing = [writing.result() for writing in self._writing], []
        return Moved(sum(each.size_bytes for each in moved), sum(each.seconds for each in moved))

    def onload(self) -> Moved:
        """Restores the memory and the values of every tensor."""
        self.wait()
        began, size = perf_counter(), 0
        for one in self._moved.values():
            one.storage.resize_(one.size_bytes)
            self._place.read(_bytes_of(one.storage), one.at)
            size += one.size_bytes
        self._moved.clear()
        self._end = 0
        return Moved(size, perf_counter() - began)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether ``tensor`` is offloaded or being written."""
        return tensor.untyped_storage()._cdata in self._moved

    def close(self) -> None:
        """Ends the thread and frees the place. Tensors that are in it are lost."""
        self._thread.shutdown()
        self._place.close()

    def _write(self, moving: Sequence[_Moving]) -> Moved:
        began, size = perf_counter(), 0
        for one in moving:
            # On a stream of its own, beside the copies of the weights that are registered meanwhile.
            self._streams.run("device_to_host", partial(self._place.write, _bytes_of(one.storage), one.at))
            one.storage.resize_(0)
            size += one.size_bytes
        return Moved(size, perf_counter() - began)


def make_sleep(kind: Literal["none", "cpu", "nvme"], device: torch.device, folder: Path) -> SleepOffload | None:
    """Returns what ``trainer.sleep_offload: kind`` offloads with on ``device``; ``None`` if nothing moves. ``folder``: of the file."""
    on_gpu = device.type == "cuda"
    if kind == "nvme":
        return SleepOffload(FilePlace(folder, host_zeros(STAGED_BYTES, torch.uint8, pinned=True) if on_gpu else None), device)
    return SleepOffload(HostPlace(pinned=True), device) if kind == "cpu" and on_gpu else None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
