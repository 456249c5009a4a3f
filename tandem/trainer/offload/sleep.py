"""Offloads tensors that are not in use, and restores them: the training state of a pod during a rollout."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.trainer.offload.tensor_file import TensorFile
from tandem.types import RunError

ALIGNMENT_BYTES = 4096


class Moved(NamedTuple):
    """The bytes written or read, and the ``seconds`` it took."""

    size_bytes: int = 0
    seconds: float = 0.0


class _Place(NamedTuple):
    storage: torch.UntypedStorage
    size_bytes: int
    at: int


class SleepFile:
    """Offloads the storages of tensors to an unnamed file in ``folder`` and frees their memory until they are loaded again.

    A storage is moved once, however many tensors and views share it. After ``onload`` each tensor has the same bits as before; until then
    it has no memory and must not be read. CPU tensors only; memory that torch does not own (a mapped file) is not moved.
    """

    def __init__(self, folder: Path) -> None:
        self._file = TensorFile(folder, lambda reason: RunError(
            f"'{folder}' cannot hold the trainer's state during the rollout: {reason}; make room, name another folder in 'trainer.offload_folder', or "
            "set trainer.sleep_offload to none"
        ))  # fmt: skip
        self._thread = ThreadPoolExecutor(1, "sleep-file")
        self._places: dict[int, _Place] = {}
        self._end = 0
        self._writing: list[Future[Moved]] = []

    def begin_offload(self, tensors: Iterable[Tensor]) -> int:
        """Starts to write the storages of ``tensors`` that are not in the file yet, in a thread that frees each once it is written. Returns
        their bytes. Raises ``RunError`` if the folder has no room."""
        places = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or storage._cdata in self._places or not storage.resizable() or storage.device.type != "cpu":
                continue
            place = _Place(storage, size, self._end)
            self._places[storage._cdata] = place
            places.append(place)
            self._end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._file.grow(self._end)
        if places:
            self._writing.append(self._thread.submit(self._write, places))
        return sum(place.size_bytes for place in places)

    def wait(self) -> Moved:
        """Waits for all writes. Returns what was written since the last ``wait``; raises ``RunError`` if the disk failed."""
        moved, self._writing = [writing.result() for writing in self._writing], []
        return Moved(sum(each.size_bytes for each in moved), sum(each.seconds for each in moved))

    def onload(self) -> Moved:
        """Restores the memory and the values of every tensor."""
        self.wait()
        began, size = perf_counter(), 0
        for place in self._places.values():
            place.storage.resize_(place.size_bytes)
            self._file.read(_bytes_of(place.storage), place.at)
            size += place.size_bytes
        self._places.clear()
        self._end = 0
        return Moved(size, perf_counter() - began)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether ``tensor`` is in the file or being written to it."""
        return tensor.untyped_storage()._cdata in self._places

    def close(self) -> None:
        """Ends the thread and removes the file. Tensors that are in it are lost."""
        self._thread.shutdown()
        self._file.close()

    def _write(self, places: Sequence[_Place]) -> Moved:
        began, size = perf_counter(), 0
        for place in places:
            self._file.write(_bytes_of(place.storage), place.at)
            place.storage.resize_(0)
            size += place.size_bytes
        return Moved(size, perf_counter() - began)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
