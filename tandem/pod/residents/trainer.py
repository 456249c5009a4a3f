"""The residents of one trainer rank: where each is now, and the moves that bring them where a phase needs them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol

from torch import Tensor

from tandem.layout.residents import RESIDENTS, Move, Phase, Residency, State
from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.storage.digests import best_algorithm, new_digest
from tandem.trainer.offload.offloader import Offloader, storage_bytes
from tandem.types import DamagedOffload

AWAY = (State.MEMORY, State.DISK)


class Held(Protocol):
    """The tensors of a resident, and how it is made and destroyed."""

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that it has now; several may share storage, and none are there before it is made."""
        ...

    def instantiate(self) -> None: ...

    def destroy(self) -> int:
        """Frees its memory. Returns the bytes of it."""
        ...


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """A resident that is never destroyed."""

    tensors: Callable[[], list[Tensor]]

    def instantiate(self) -> None:
        raise AssertionError("is there from the start")

    def destroy(self) -> int:
        raise AssertionError("has to be saved")


@dataclass(frozen=True, slots=True)
class HeldGradients:
    """The gradients: ``drop`` frees them and returns their bytes; the next backward pass makes new ones."""

    drop: Callable[[], int]

    def tensors(self) -> list[Tensor]:
        return []

    def instantiate(self) -> None:
        pass

    def destroy(self) -> int:
        return self.drop()


class ResidentMove(NamedTuple):
    """A move that has ended: the bytes that left or entered the device, and its seconds."""

    resident: str
    move: Move
    size_bytes: int
    seconds: float


class TrainerResidents:
    """Moves the residents ``held``, by their names in ``layout.residents``, as ``residency`` says. ``offloader``: where they are saved (``None``: that is
    where they are already). ``fault_point``: passed halfway through each move, and after it."""

    def __init__(self, residency: Residency, held: Mapping[str, Held], offloader: Offloader | None, fault_point: FaultPoint = no_fault) -> None:
        self.residency, self.held = residency, held
        self._offloader, self._fault_point = offloader, fault_point
        # What is there from the start; others are made when a phase needs them.
        self.states = {name: State.DEVICE if held[name].tensors() else State.ABSENT for name in RESIDENTS if name in held}
        self.states |= {name: State.DEVICE for name in self.states if RESIDENTS[name].content == "state"}
        self._digests: dict[str, str] = {}
        self._under_way: dict[str, tuple[Move, int]] = {}
        self._ended: list[ResidentMove] = []

    def leave(self, phase: Phase, step: int, but: Collection[str] = ()) -> None:
        """Begins to move away what ``phase`` does not need, residents ``but`` excepted. Raises ``RunError`` if there is no room for it."""
        for name in self.states:
            wanted = self.residency.state(RESIDENTS[name], phase)
            if name in but or wanted is State.DEVICE or (self.states[name] is not State.DEVICE):
                continue
            if wanted is State.ABSENT:
                self._destroy(name, step)
            elif self._offloader is not None:
                self._settle(name)
                tensors, is_frozen = self.held[name].tensors(), RESIDENTS[name].content == "frozen"
                self._offloader.begin_offload(name, tensors, is_frozen=is_frozen, halfway=self._halfway(Move.OFFLOAD, name, step))
                self.states[name], self._under_way[name] = wanted, (Move.OFFLOAD, step)

    def prefetch(self, phase: Phase, step: int) -> None:
        """Begins to bring back what ``phase`` needs and is saved."""
        for name in self._missing(phase):
            if self.states[name] in AWAY:
                assert self._offloader is not None
                self._settle(name)
                self._offloader.begin_reload(name, self._halfway(Move.RELOAD, name, step))
                self.states[name], self._under_way[name] = State.DEVICE, (Move.RELOAD, step)

    def enter(self, phase: Phase, step: int) -> None:
        """Moves away what ``phase`` does not need and brings what it needs; returns when all of it is there. Raises ``DamagedOffload`` if something
        came back with other bytes."""
        self.leave(phase, step)
        for name in self._missing(phase):
            if self.states[name] is State.ABSENT:
                self._instantiate(name, step)
        self.prefetch(phase, step)
        self.settle()

    def settle(self) -> None:
        """Waits for every move that was begun."""
        for name in list(self._under_way):
            self._settle(name)

    def take_moves(self) -> list[ResidentMove]:
        """Returns the moves that ended since this was asked, in their order."""
        ended, self._ended = self._ended, []
        return ended

    def held_bytes(self) -> dict[str, int]:
        """Returns the bytes of the device's memory that each resident holds now."""
        return {name: storage_bytes(self.held[name].tensors()) for name in self.states}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _missing(self, phase: Phase) -> list[str]:
        wanted = self.residency.on_device(phase, self.states)
        return [name for name in self.states if name in wanted and self.states[name] is not State.DEVICE]

    def _settle(self, name: str) -> None:
        if name not in self._under_way:
            return
        assert self._offloader is not None
        move, step = self._under_way.pop(name)
        moved = self._offloader.wait(name)
        assert moved is not None
        if move is Move.OFFLOAD and moved.size_bytes and not moved.copied_bytes:
            # The saved copy was still valid.
            move = Move.DESTROY
        self._ended.append(ResidentMove(name, move, moved.size_bytes, moved.seconds))
        self._fault_point(f"after:{move}_{name}:{step}")

    def _halfway(self, move: Move, name: str, step: int) -> Callable[[], None]:
        return lambda: self._fault_point(f"before:{move}_{name}:{step}")

    def _destroy(self, name: str, step: int) -> None:
        began = perf_counter()
        if RESIDENTS[name].content == "frozen":
            self._digests[name] = _digest(self.held[name].tensors())
        self._halfway(Move.DESTROY, name, step)()
        size = self.held[name].destroy()
        self.states[name] = State.ABSENT
        self._ended.append(ResidentMove(name, Move.DESTROY, size, perf_counter() - began))
        self._fault_point(f"after:{Move.DESTROY}_{name}:{step}")

    def _instantiate(self, name: str, step: int) -> None:
        self.states[name] = State.DEVICE
        if RESIDENTS[name].content == "made":
            return
        began = perf_counter()
        self.held[name].instantiate()
        self._halfway(Move.INSTANTIATE, name, step)()
        if self._digests.get(name, "") not in ("", _digest(self.held[name].tensors())):
            raise DamagedOffload(f"the {name} was read again from its folder and has other weights than before; the files have changed")
        self._ended.append(ResidentMove(name, Move.INSTANTIATE, storage_bytes(self.held[name].tensors()), perf_counter() - began))
        self._fault_point(f"after:{Move.INSTANTIATE}_{name}:{step}")


def _digest(tensors: list[Tensor]) -> str:
    digest = new_digest(best_algorithm())
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        digest.update(bytes_view(host))
    return str(digest.hexdigest())
