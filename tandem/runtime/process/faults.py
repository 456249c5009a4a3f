"""Deaths on purpose: ``kill -9`` at a named point of a run, so that a test can prove that nothing is lost.

A point is ``WHEN:NAME:STEP``, with ``WHEN`` before or after and ``NAME`` a journal commit, a state of a sidecar, a call, or
a phase of a rank's step. Instead of dying a process may ``stall`` before the point: it sleeps for ever. A plan is
``ROLE:WHEN:NAME:STEP[,...]``; it reaches each process as a command-line argument. A fault strikes once in a run's life: its
marker in the run's folder is on the disk before the signal is sent, so the resumed run passes the point alive.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from tandem.types.errors import UserError

FaultPoint = Callable[[str], None]

ROLES = ("controller", "trainer_shim", "trainer_worker", "rollout_shim", "rollout_worker", "pod")


def no_fault(name: str) -> None:
    """The fault point of every run that is not a test."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``role`` dies ``when`` (before, after; or does not die but ``stall``) the point ``name`` of ``step``. The role ``pod`` is everything at once:
    the controller kills its own process group, and what it started dies with it."""

    role: str
    when: str
    name: str
    step: int

    def __str__(self) -> str:
        return f"{self.role}:{self.when}:{self.name}:{self.step}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What shall die where."""

    faults: tuple[Fault, ...]

    @classmethod
    def parse(cls, text: str) -> "FaultPlan":
        """From ``ROLE:WHEN:NAME:STEP``, several with commas. Raises ``UserError``."""
        faults = []
        for part in text.split(","):
            found = re.fullmatch(r"(\w+):(before|after|stall):(\w+):(\d+)", part.strip())
            if not found or (found[1] not in ROLES and not re.fullmatch(r"rank\d+", found[1])):
                raise UserError(
                    f"the fault '{part}' is not ROLE:before|after|stall:NAME:STEP with a role of {', '.join(ROLES)}, rankN; "
                    "for example trainer_worker:after:train:3"
                )
            faults.append(Fault(found[1], found[2], found[3], int(found[4])))
        return cls(tuple(faults))

    def __str__(self) -> str:
        return ",".join(map(str, self.faults))

    def point(self, roles: str | Collection[str], run_directory: Path) -> FaultPoint:
        """The fault point of a process that has ``roles``. The controller's also carries out the pod's faults."""
        roles = {roles} if isinstance(roles, str) else set(roles)
        roles |= {"pod"} if "controller" in roles else set()
        mine = {f"{f.when.replace('stall', 'before')}:{f.name}:{f.step}": f for f in self.faults if f.role in roles}
        if not mine:
            return no_fault

        def point(name: str) -> None:
            fault = mine.get(name)
            if fault is not None and _mark(run_directory, fault):
                if fault.when == "stall":
                    _sleep()
                _die(fault)

        return point


def _mark(run_directory: Path, fault: Fault) -> bool:
    """Whether this call was the one that made the fault's marker; it is on the disk when this returns."""
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
    # Only a process group that this process leads is the pod's own; another one may hold the shell or the test that
    # started it. The children die in either case: they asked the kernel for it (tandem.runtime.process.child).
    if fault.role == "pod" and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
