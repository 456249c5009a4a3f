"""The process of one rank: ``python -m tandem.trainer.rank_process SETTINGS --channel FD``.

It joins the other ranks and serves the calls of the module named by ``target`` in the settings until its channel is closed. Such a module
has ``CALLS``, the names of its calls, and ``make(settings)``, which returns them with the process's fault point.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tandem.layout.mesh import Mesh, MeshShape
from tandem.runtime.collectives.communicator import Communicator, connect, join
from tandem.runtime.health.round_trips import round_trips
from tandem.runtime.health.step_times import StepClock, StepTimesTable, step_times_path
from tandem.runtime.machine.rank_device import rank_device
from tandem.runtime.process.faults import BitFlips, FaultPlan, FaultPoint, no_fault
from tandem.runtime.process.heartbeat_table import Heartbeat, HeartbeatTable
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.process.waits import WAITS
from tandem.runtime.process.worker import end_of_imports, serve
from tandem.runtime.records.logs import log_uncaught, setup
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.trainer.parallel.ranks import Ranks, alone
from tandem.types import CollectiveError, UserError

logger = logging.getLogger(__name__)
SUPERVISED_S = 1e8
"""Timeout in seconds of collectives over gloo: none. The supervisor finds hung ranks, and knows whether all were paused; gloo would count a
pause. A dead rank ends every collective at once."""
_CONNECT_S = 1e6
"""Timeout in seconds of the store between machines: the longest that torch can count."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's process as its target receives it. ``ranks``: the mesh. ``saving``: a communicator of all ranks that only checkpoints use.
    ``heartbeat``: reports its progress (``None``: no supervisor). ``threads``: of this process. ``store``: reaches all ranks, for a library that connects
    them for itself, with collectives that end after ``timeout_s``. ``here``: a communicator of the ranks of this machine where others are on other
    machines (``None``: all are here). ``flips``: bits that a test flips in this rank's arithmetic.
    ``step_times``: of the ranks of this machine (``None``: there is one rank)."""

    ranks: Ranks
    directory: Path
    saving: Communicator
    heartbeat: Heartbeat | None = None
    fault_point: FaultPoint = no_fault
    threads: int = 1
    store: dist.Store = field(default_factory=dist.HashStore)
    timeout_s: float = SUPERVISED_S
    here: Communicator | None = None
    flips: BitFlips | None = None
    step_times: StepTimesTable | None = None

    @property
    def publishing(self) -> Communicator:
        """The ranks that write the same shared memory: those of this machine."""
        return self.here or self.ranks.world

    def enter(self, phase: str, step: int) -> None:
        """Reports that this rank starts ``phase`` of ``step``."""
        if self.heartbeat is not None:
            self.heartbeat.phase_is(phase, step)
        self.fault_point(f"before:{phase}:{step}")

    def beat(self) -> None:
        """Reports progress."""
        if self.heartbeat is not None:
            self.heartbeat.beat()

    def rest(self) -> None:
        """Reports that this rank waits for its next call."""
        if self.heartbeat is not None:
            self.heartbeat.rests()


def rank_alone(directory: Path, device: torch.device | str = "cpu", threads: int = 1, fault_point: FaultPoint = no_fault) -> Rank:
    """Returns this process as the only rank, without a supervisor."""
    ranks = alone(device)
    return Rank(ranks, directory, ranks.world, fault_point=fault_point, threads=threads)


def start(settings: RankSettings, deterministic: bool = False, sequence: bool = False) -> Rank:
    """Joins the other ranks of the mesh. ``deterministic``, ``sequence``: how tensor parallelism shards a model."""
    directory, mesh = Path(settings.directory), Mesh(MeshShape(**settings.shape), settings.rank)
    torch.set_num_threads(settings.threads)
    device = rank_device(settings.device, settings.here.index(mesh.rank) if settings.here else mesh.rank)
    heartbeat = HeartbeatTable(Path(settings.heartbeats), mesh.shape.world).writer(mesh.rank)
    times = None
    if mesh.shape.world > 1:
        times = StepTimesTable(step_times_path(Path(settings.heartbeats)), mesh.shape.world)
        heartbeat.clock = StepClock(mesh.rank, partial(times.write, mesh.rank), round_trips)
    fault_point, flips = _faults(settings, directory)
    if mesh.shape.world == 1:
        single = alone(device)
        return Rank(single, directory, single.world, heartbeat, fault_point, settings.threads, flips=flips)
    timeout_s = settings.hang_timeout_s if device.type == "cuda" else SUPERVISED_S
    try:
        store = _rendezvous(settings, mesh.shape.world)
        groups = join(mesh, store, device, SUPERVISED_S, heartbeat, settings.host, nccl_deadline_s=settings.hang_timeout_s)
        saving = _among(range(mesh.shape.world), "checkpoints", store, settings)
        here = _among(settings.here, "here", store, settings) if settings.here else None
    except RuntimeError as error:
        # A rank has died meanwhile.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CollectiveError(f"rank {mesh.rank} of {mesh.shape.world} did not find the others: {reason}") from None
    ranks = Ranks(mesh, groups, deterministic, sequence, device)
    return Rank(ranks, directory, saving, heartbeat, fault_point, settings.threads, store, timeout_s, here, flips, times)


def _faults(settings: RankSettings, directory: Path) -> tuple[FaultPoint, BitFlips | None]:
    """Returns the faults of a rank: where it dies, and which bits it flips."""
    if not settings.faults:
        return no_fault, None
    plan = FaultPlan.parse(settings.faults)
    point, flips = plan.point(settings.roles, directory), plan.flips(settings.roles, directory)
    if flips is None:
        return point, None

    def both(name: str) -> None:
        flips.enters(name)
        point(name)

    return both, flips


def _among(ranks: Sequence[int], name: str, store: dist.Store, settings: RankSettings) -> Communicator:
    """Connects ``ranks``, of which this is one, over gloo."""
    if len(ranks) == 1:
        return Communicator(name, 0, 1, None, SUPERVISED_S)
    own = dist.PrefixStore(f"{name}/{ranks[0]}/", store)
    return connect(name, ranks.index(settings.rank), len(ranks), own, torch.device("cpu"), SUPERVISED_S, hostname=settings.host)


def _rendezvous(settings: RankSettings, world: int) -> dist.Store:
    """Returns the store through which the ranks find each other."""
    if not settings.here:
        store: dist.Store = dist.FileStore(settings.rendezvous, world)
        store.set_timeout(timedelta(seconds=SUPERVISED_S))
        return store
    host, _, port = settings.rendezvous.rpartition(":")
    is_first, limit = settings.listener is not None, timedelta(seconds=_CONNECT_S)
    return dist.TCPStore(host, int(port), None, is_first, limit, wait_for_workers=False, master_listen_fd=settings.listener)


def make_methods(settings: RankSettings) -> tuple[Mapping[str, Method], FaultPoint]:
    """Returns the calls made by the module ``settings.target``; if that fails, calls that all raise its error."""
    target: Any = import_module(settings.target)
    end_of_imports()
    try:
        made: tuple[Mapping[str, Method], FaultPoint] = target.make(settings)
        return made
    except Exception as error:
        if not isinstance(error, UserError):
            logger.exception("rank %d did not start", settings.rank)
        reason = error

    def fail(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        raise reason

    return dict.fromkeys(target.CALLS, fail), no_fault


def main(settings: RankSettings, channel: int) -> None:
    setup(settings.log, Path(settings.directory) / "logs", rank=settings.rank)
    log_uncaught()
    WAITS.begin(settings.log)
    methods, fault_point = make_methods(settings)
    serve(methods, channel, fault_point=fault_point, sends_spans=True)


def run(arguments: Sequence[str]) -> NoReturn:
    """Runs the program with ``arguments``."""
    main(RankSettings.from_json(arguments[0]), int(arguments[arguments.index("--channel") + 1]))
    logging.shutdown()
    # Threads of the process groups may still wait for ranks that have ended.
    os._exit(0)


if __name__ == "__main__":
    run(sys.argv[1:])
