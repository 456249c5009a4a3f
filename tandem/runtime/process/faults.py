"""Fault injection: ``kill -9`` at a named point of a run, so that tests can prove that nothing is lost.

A point is ``WHEN:NAME:STEP``, with ``WHEN`` before or after and ``NAME`` a journal commit, a state of a sidecar, a call, or a phase of a
rank's step. With ``stall`` the process sleeps for ever before the point instead. A plan is ``ROLE:WHEN:NAME:STEP[,...]``; each process
gets it as a command-line argument. A fault happens once in the life of a run: its marker in the run's folder is on the disk before the
signal is sent, so a resumed run passes the point.

``ROLE:flip:NAME:STEP`` flips one bit in the arithmetic of a rank's step, once: of a ``gradient``, or of the output of a layer's products (``matmul``). With
``flips`` the rank does so in every pass from that step on, as a broken unit does.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.types.errors import UserError

FaultPoint = Callable[[str], None]
FLIPS = ("gradient", "matmul")
"""Where a bit may be flipped."""

_NUMBERED = r"(trainer_)?rank\d+|rollout_worker\d+|pod\d+_(rollout_(shim|worker\d*)|trainer_(shim|rank\d+))"
ROLES = ("controller", "trainer_shim", "trainer_worker", "rollout_shim", "rollout_worker", "pod")


def no_fault(name: str) -> None:
    """Does nothing: the fault point of a run without faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Kills ``role`` ``when`` (before or after; ``stall``: makes it sleep) it reaches the point ``name`` of ``step``. The role ``pod`` is the
    whole pod: the controller kills its own process group, and its children with it. ``rankN`` is rank N of a run on data, also of
    the supervised fine-tuning that a pod's run begins with; a pod's trainer has ``trainer_worker``, its rank 0, and ``trainer_rankN``; its
    rollout workers are ``rollout_worker``, the first one, and ``rollout_workerN``. The processes of
    pod N have ``podN_`` before their role."""

    role: str
    when: str
    name: str
    step: int

    def __str__(self) -> str:
        return f"{self.role}:{self.when}:{self.name}:{self.step}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a run."""

    faults: tuple[Fault, ...]

    @classmethod
    def parse(cls, text: str) -> "FaultPlan":
        """Reads ``ROLE:WHEN:NAME:STEP[,...]``. Raises ``UserError``."""
        faults = []
        for part in text.split(","):
            match = re.fullmatch(r"(\w+):(before|after|stall|flips?):(\w+):(\d+)", part.strip())
            is_known = match and (match[1] in ROLES or re.fullmatch(_NUMBERED, match[1]))
            if not match or not is_known or (match[2].startswith("flip") and match[3] not in FLIPS):
                raise UserError(
                    f"the fault '{part}' is not ROLE:before|after|stall:NAME:STEP or ROLE:flip|flips:gradient|matmul:STEP, "
                    f"with a role of {', '.join(ROLES)}, rankN, trainer_rankN, rollout_workerN, "
                    "podN_rollout_shim, podN_trainer_shim; for example trainer_worker:after:train:3"
                )
            faults.append(Fault(match[1], match[2], match[3], int(match[4])))
        return cls(tuple(faults))

    def __str__(self) -> str:
        return ",".join(map(str, self.faults))

    def point(self, roles: str | Collection[str], run_directory: Path) -> FaultPoint:
        """Returns the fault point of a process with ``roles``. That of the controller includes the faults of the role ``pod``."""
        roles = {roles} if isinstance(roles, str) else set(roles)
        roles |= {"pod"} if "controller" in roles else set()
        mine = {f"{f.when.replace('stall', 'before')}:{f.name}:{f.step}": f for f in self.faults if f.role in roles and not f.when.startswith("flip")}
        if not mine:
            return no_fault

        def point(name: str) -> None:
            fault = mine.get(name)
            if fault is not None and _mark(run_directory, fault):
                if fault.when == "stall":
                    _sleep()
                _die(fault)

        return point

    def flips(self, roles: str | Collection[str], run_directory: Path) -> "BitFlips | None":
        """Returns the bits that a process with ``roles`` flips, ``None`` if it flips none."""
        roles = {roles} if isinstance(roles, str) else set(roles)
        mine = [fault for fault in self.faults if fault.role in roles and fault.when.startswith("flip")]
        return BitFlips(mine, run_directory) if mine else None


class BitFlips:
    """Says when a rank flips a bit. ``enters`` is called with each fault point, by which the step is known."""

    def __init__(self, faults: Sequence[Fault], run_directory: Path) -> None:
        self._faults, self._directory, self._step = faults, run_directory, -1

    def enters(self, name: str) -> None:
        match = re.fullmatch(r"before:train:(\d+)", name)
        if match:
            self._step = int(match[1])

    def now(self, place: str) -> bool:
        """Returns whether a bit of ``place`` (one of ``FLIPS``) is flipped now."""
        for fault in self._faults:
            if fault.name == place and (self._step >= fault.step if fault.when == "flips" else self._step == fault.step and _mark(self._directory, fault)):
                return True
        return False


def _mark(run_directory: Path, fault: Fault) -> bool:
    """Writes the fault's marker to the disk. Returns whether it is new."""
    folder = run_directory / "faults"
    folder.mkdir(exist_ok=True)
    try:
        marker = os.open(folder / str(fault).replace(":", "-"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    os.fsync(marker)
    os.close(marker)
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return True


def _sleep() -> None:
    while True:
        time.sleep(3600)


def _die(fault: Fault) -> None:
    # A process group that this process does not lead may hold the shell or the test that started it. The children are killed in either
    # case: they asked the kernel for it (tandem.runtime.process.child).
    if fault.role == "pod" and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
