"""Where on the machine each server runs: which GPUs are its own, which cores, and how many threads it has."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tandem.config.servers import ServersConfig
from tandem.runtime.machine.gpus import DRIVER, probe
from tandem.runtime.process.processes import available_cores
from tandem.types import UserError

Unit = TypeVar("Unit", str, int)


@dataclass(frozen=True, slots=True)
class Place:
    """What a server runs on. ``gpus``: as ``CUDA_VISIBLE_DEVICES`` names them. ``cores``: their numbers; empty: all of the machine's."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    threads: int

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to divide. ``cores``: empty where servers are bound to none, as there are more of them than cores."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    threads_each: int


def assign(units: Sequence[Unit], held: Sequence[Sequence[Unit]], count: int, most: int | None = None) -> tuple[Unit, ...] | None:
    """Returns the ``count`` of ``units`` that are ``held`` by the fewest, of equal ones those that are listed first; ``None`` if fewer than ``count`` are held
    by less than ``most``."""
    holders = {unit: sum(unit in each for each in held) for unit in units}
    free = [unit for unit in units if most is None or holders[unit] < most]
    chosen = sorted(free, key=lambda unit: holders[unit])[:count]
    return tuple(unit for unit in units if unit in chosen) if len(chosen) == count else None


def place_for(config: ServersConfig, machine: Machine, held: Sequence[Place]) -> Place | None:
    """Returns the place of one more server of ``config`` beside those that are ``held``; ``None`` if no GPU is free."""
    gpus = assign(config.gpus or machine.gpus, [each.gpus for each in held], config.gpus_each, config.servers_per_gpu)
    if gpus is None:
        return None
    cores = assign(machine.cores, [each.cores for each in held], machine.threads_each) or ()
    return Place(gpus, cores, machine.threads_each)


def find_machine(servers: Mapping[str, ServersConfig]) -> Machine:
    """Returns what this machine has for ``servers``. Raises ``UserError`` if they need more GPUs than there are."""
    gpus = _visible_gpus(servers)
    check_gpus(servers, gpus)
    return divide_cores(gpus, tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (), available_cores(), _count(servers))


def divide_cores(gpus: tuple[str, ...], cores: tuple[int, ...], available: int, count: int) -> Machine:
    """Returns a machine that ``count`` servers share. ``cores``: those that this process may run on. ``available``: how many it may use at once; where that is
    less, their numbers say nothing."""
    return Machine(gpus, cores if len(cores) == available >= count else (), max(1, available // max(1, count)))


def too_few_cores(servers: Mapping[str, ServersConfig], available: int) -> str | None:
    """Returns a line if there are more ``servers`` than cores."""
    count = _count(servers)
    if count <= available:
        return None
    return f"warning: {count} servers share {available} core{'s' * (available > 1)} and slow each other down; lower 'count' of 'servers'"


def _count(servers: Mapping[str, ServersConfig]) -> int:
    return sum(config.most for config in servers.values())


def check_gpus(servers: Mapping[str, ServersConfig], visible: Sequence[str]) -> None:
    """Raises ``UserError`` if not all of ``servers`` find the GPUs that they need among those that are named or ``visible``."""
    held: list[Place] = []
    for name, config in servers.items():
        for number in range(config.most):
            place = place_for(config, Machine(tuple(visible), (), 1), held)
            if place is None:
                known = config.gpus or visible
                raise UserError(
                    f"'servers.{name}' has up to {config.most} servers with {config.gpus_each} GPUs each, and there is room for {number} on {len(known)} GPUs "
                    f"({', '.join(known) or 'none is found'}); take fewer servers or raise 'servers_per_gpu'"
                )
            held.append(place)


def _visible_gpus(servers: Mapping[str, ServersConfig]) -> tuple[str, ...]:
    if not any(config.gpus_each and not config.gpus for config in servers.values()):
        return ()
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if own:
        return tuple(name.strip() for name in own.split(","))
    return tuple(map(str, range(len(probe().gpus)))) if any(path.exists() for path in DRIVER) else ()
