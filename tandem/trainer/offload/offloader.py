"""Moves named groups of tensors between a device and a place, and frees their memory meanwhile: the residents of a pod's trainer."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.trainer.offload.places import Place
from tandem.trainer.offload.streams import streams_of
from tandem.types import DamagedOffload

ALIGNMENT_BYTES = 4096
CPU = torch.device("cpu")
READERS = 4
"""Threads that bring storages back, at most."""


class Moved(NamedTuple):
    """The bytes that left or entered the device's memory, those of them that were ``copied`` (a saved copy that is still valid is not written
    again), and the ``seconds`` that it took."""

    size_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0


@dataclass
class _Saved:
    """A storage, its bytes, its offset in the place, and the digest of what was written there (``None``: not written)."""

    storage: torch.UntypedStorage
    size_bytes: int
    at: int
    digest: str | None = None


@dataclass
class _Group:
    """What the place has of one group: ``capacity`` bytes from ``start`` on. ``is_away``: its memory is freed, or will be."""

    start: int = 0
    capacity: int = 0
    saved: list[_Saved] = field(default_factory=list)
    is_away: bool = False
    pending: "Future[Moved] | None" = None


def nothing() -> None:
    """Is called halfway through a move."""


class Offloader:
    """Offloads the storages of groups of tensors to ``place``, in a thread, and frees their memory until they are reloaded.

    A storage is moved once, however many tensors and views share it. After ``reload`` each tensor has the same bits as before; until then
    it has no memory and must not be read. Only memory of ``device`` is moved, and none that torch does not own (a mapped file)."""

    def __init__(self, place: Place, device: torch.device = CPU) -> None:
        self._place, self._device = place, device
        self._streams = streams_of(device)
        # A thread begins on GPU 0, where it would make a context of this process.
        on_own_gpu = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "offload", on_own_gpu)
        # Storages of host memory are read side by side: most of the time is page faults of their new memory.
        self._readers = ThreadPoolExecutor(max(1, min(READERS, torch.get_num_threads())), "reload") if device.type == "cpu" else None
        self._groups: dict[str, _Group] = {}
        self._end = 0

    def begin_offload(self, name: str, tensors: Iterable[Tensor], *, is_frozen: bool = False, halfway: Callable[[], None] = nothing) -> None:
        """Starts to offload group ``name``, the storages of ``tensors``, which ``wait`` waits for. ``is_frozen``: they never change, so that they are
        written once. Raises ``RunError`` if there is no room for them."""
        self.wait(name)
        group = self._groups.setdefault(name, _Group())
        assert not group.is_away, name
        storages = dict[int, torch.UntypedStorage]()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.device.type == self._device.type:
                storages.setdefault(storage._cdata, storage)
        self._place_group(group, list(storages.values()), is_frozen)
        group.is_away = True
        # The update that was launched last must be done before its results are copied.
        self._streams.wait("device_to_host", self._streams.record_event("compute"))
        group.pending = self._thread.submit(self._write, group, halfway)

    def begin_reload(self, name: str, halfway: Callable[[], None] = nothing) -> None:
        """Starts to bring group ``name`` back, after its offload has ended."""
        group = self._groups[name]
        self.wait(name)
        assert group.is_away, name
        group.is_away = False
        group.pending = self._thread.submit(self._read, name, group, halfway)

    def wait(self, name: str) -> Moved | None:
        """Waits for the move of group ``name`` that was begun. Returns what it moved, ``None`` if none was begun since the last ``wait``. Raises
        ``RunError`` if the disk failed, and ``DamagedOffload`` if bytes that were read are not those that were written."""
        group = self._groups.get(name)
        if group is None or group.pending is None:
            return None
        pending, group.pending = group.pending, None
        return pending.result()

    def is_away(self, name: str) -> bool:
        """Returns whether group ``name`` is offloaded or being offloaded."""
        return name in self._groups and self._groups[name].is_away

    def close(self) -> None:
        """Ends the thread and frees the place. Tensors that are in it are lost."""
        self._thread.shutdown()
        if self._readers is not None:
            self._readers.shutdown()
        self._place.close()

    def _place_group(self, group: _Group, storages: list[torch.UntypedStorage], is_frozen: bool) -> None:
        """Gives each of ``storages`` its offset. A frozen group keeps its digests if it has the same storages as before."""
        sizes = [storage.nbytes() for storage in storages]
        before = [(one.storage._cdata, one.size_bytes) for one in group.saved]
        if is_frozen and before == [(storage._cdata, size) for storage, size in zip(storages, sizes, strict=True)]:
            return
        needed = sum(_aligned(size) for size in sizes)
        if needed > group.capacity:
            group.start, group.capacity = self._end, needed
            self._end += needed
            self._place.grow(self._end)
        group.saved, at = [], group.start
        for storage, size in zip(storages, sizes, strict=True):
            group.saved.append(_Saved(storage, size, at))
            at += _aligned(size)

    def _write(self, group: _Group, halfway: Callable[[], None]) -> Moved:
        began, size, copied = perf_counter(), 0, 0
        for number, one in enumerate(group.saved):
            if number == len(group.saved) // 2:
                halfway()
            if one.digest is None:
                # On a stream of its own, beside the copies of the weights that are registered meanwhile.
                self._streams.run("device_to_host", partial(self._save, one))
                copied += one.size_bytes
            one.storage.resize_(0)
            size += one.size_bytes
        return Moved(size, copied, perf_counter() - began)

    def _save(self, one: _Saved) -> None:
        one.digest = self._place.write(_bytes_of(one.storage), one.at)

    def _read(self, name: str, group: _Group, halfway: Callable[[], None]) -> Moved:
        began, size, half = perf_counter(), sum(one.size_bytes for one in group.saved), len(group.saved) // 2
        load, read = partial(self._load, name), map if self._readers is None else self._readers.map
        list(read(load, group.saved[:half]))
        halfway()
        list(read(load, group.saved[half:]))
        return Moved(size, size, perf_counter() - began)

    def _load(self, name: str, one: _Saved) -> None:
        one.storage.resize_(one.size_bytes)
        # The allocator may give memory whose last use was launched and is not done.
        self._streams.wait("host_to_device", self._streams.record_event("compute"))
        self._streams.run("host_to_device", partial(self._verified, name, one))

    def _verified(self, name: str, one: _Saved) -> None:
        if self._place.read(_bytes_of(one.storage), one.at) != one.digest:
            raise DamagedOffload(f"the offloaded {name} came back from the disk with other bytes than were written; the disk or its cable is failing")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of memory behind ``tensors``, each storage counted once. Addresses that are only reserved (ZeRO 3) are not counted."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage.resizable()}.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
