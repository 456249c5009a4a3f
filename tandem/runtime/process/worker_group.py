"""The worker processes of one mesh, which answer calls together. Imports no torch.

A call goes to every rank at once. It returns rank 0's result when all ranks have answered, or raises ``RanksLost`` as soon as a rank is
dead or hung; the message names the rank, its phase and step, and where the other ranks are blocked. The supervisor of a run on data and the
shim of a trainer sidecar each own a ``WorkerGroup``.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tandem.layout.mesh import MeshShape
from tandem.runtime.health.step_times import RankTimes, read_step_times, step_times_path
from tandem.runtime.machine.heap import kept_heap_environment
from tandem.runtime.process.deadline import PROCESS_CLOCK
from tandem.runtime.process.forks import ForkServer, SharedForkServer
from tandem.runtime.process.hang_watchdog import HangWatchdog
from tandem.runtime.process.heartbeat_table import HeartbeatTable, RankState
from tandem.runtime.process.processes import ProcessMemory, Threads, describe_exit, kill, memory_of_tree
from tandem.runtime.process.rank_settings import RankSettings
from tandem.runtime.process.stacks import STACKS_VARIABLE, innermost, remove_ended, stacks_of
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, RemoteError, RpcTimeout, WorkerDied
from tandem.runtime.traces.context import in_context
from tandem.types import CollectiveError, RunError, UserError
from tandem.types.wire import Frame

logger = logging.getLogger(__name__)
RANK_MODULE = "tandem.trainer.rank_process"
POLL_S = 0.1
GRACE_S = 2.0
"""Seconds that the other ranks have to report an error after one has ended, so that the first error is found."""


class RanksLost(WorkerDied):
    """Ranks died or hang, and all ranks must be restarted. ``ranks``: the lost ones; ``step``: the step that they were in."""

    def __init__(self, peer: str, call: str, text: str, ranks: Sequence[int] = (0,), step: int = 0) -> None:
        super().__init__(peer, call, text)
        self.ranks, self.step = tuple(ranks), step


@dataclass(frozen=True, slots=True)
class Share:
    """The ``ranks`` of a mesh, ascending, that this one of several machines starts. ``host``: the address of this machine that the others connect to;
    ``rendezvous``: ``HOST:PORT`` of rank 0, and on its machine ``listener``, the descriptor of the socket that listens there."""

    ranks: tuple[int, ...]
    host: str
    rendezvous: str
    listener: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How a group of ranks is started.

    Args:
        name: the group's name in messages.
        target: the module that makes a rank's calls (see ``trainer.rank_process``).
        directory: the run's directory.
        folder: an empty folder for rendezvous, heartbeats and stacks.
        threads: threads of each rank.
        hang_timeout_s, heartbeat_timeout_s: the longest and the shortest deadline of ``HangWatchdog``; ranks that communicate over gloo have no
            other one.
        log: the name of rank r's log file.
        roles: the roles of rank r in a plan of faults.
        environment: further variables of every rank's environment.
        python: the interpreter of another environment than this one (see ``spawn``).
        share: the ranks of this machine, where others start the rest (``None``: all are here).
        forked: its ranks are forked from a process with their modules, where that is possible (see ``GroupForks``).
    """

    name: str
    target: str
    directory: Path
    folder: Path
    threads: int
    device: str = "cpu"
    faults: str = ""
    hang_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    log: Callable[[int], str] = "rank-{}".format
    roles: Callable[[int], tuple[str, ...]] = lambda rank: (f"rank{rank}",)
    environment: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    share: Share | None = None
    forked: bool = True


def environment_of_ranks(shape: MeshShape) -> dict[str, str]:
    """Returns the variables that the processes of a mesh need at their start."""
    # Ranks share the machine's memory, so a rank must not hold more than it needs.
    return kept_heap_environment(os.environ) if shape.world > 1 else {}


def may_fork() -> bool:
    """Returns whether this system has what fork servers need."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class GroupForks:
    """The fork server of the groups that one owner starts, one after the other: with the modules of their ranks. Closing it ends it. ``shared``: that of
    another process, made for them; while it lives there is no other one."""

    def __init__(self, shared: SharedForkServer | None = None) -> None:
        self._server: ForkServer | None = None
        self._made_for: tuple[object, ...] = ()
        self._shared = shared

    def of(self, settings: GroupSettings, shape: MeshShape) -> SharedForkServer | None:
        """Returns the server for a group, begun if there is none: its imports go on meanwhile. ``None`` where ranks are started otherwise."""
        if not settings.forked or settings.python is not None or not may_fork():
            return None
        if self._shared is not None and self._shared.alive:
            return self._shared
        environment = environment_of_ranks(shape)
        wanted = (settings.target, settings.threads, *environment.items())
        if self._server is None or self._made_for != wanted or not self._server.alive:
            self.close()
            output = settings.directory / "logs" / f"{settings.log(0)}-forks.out"
            output.parent.mkdir(parents=True, exist_ok=True)
            self._server = ForkServer([settings.target, RANK_MODULE], threads=Threads(settings.threads), environment=environment, output=output)
            self._made_for = wanted
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._shared is not None:
            self._shared.close()


class WorkerGroup:
    """Starts the ranks of ``shape``, or the share of this machine, whose calls need those of the other machines. Takes one call at a time."""

    def __init__(self, settings: GroupSettings, shape: MeshShape, *, say: Callable[[str], None] = lambda line: None, forks: GroupForks | None = None) -> None:
        self.settings, self.shape, self._say = settings, shape, say
        self._forks = forks.of(settings, shape) if forks is not None else None
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._board = HeartbeatTable(settings.folder / "heartbeats", shape.world)
        self._board.clear()
        self._watch = HangWatchdog(settings.hang_timeout_s, settings.heartbeat_timeout_s, sees_all=settings.share is None)
        self.ranks = tuple(range(shape.world)) if settings.share is None else settings.share.ranks
        self._pool = ThreadPoolExecutor(len(self.ranks), thread_name_prefix="rank-call")
        self._broken = ""
        self.workers = [self._start(rank) for rank in self.ranks]

    def _start(self, rank: int) -> Worker:
        settings, folder = self.settings, self.settings.folder
        share = settings.share or Share((), "127.0.0.1", str(folder / "rendezvous"))
        listener = share.listener if rank == 0 else None
        own = RankSettings(
            settings.target, str(settings.directory), rank, asdict(self.shape), share.rendezvous, str(folder / "heartbeats"),
            settings.threads, settings.device, settings.faults, settings.roles(rank), settings.log(rank), settings.hang_timeout_s,
            share.ranks, share.host, listener,
        )  # fmt: skip
        name = settings.name if self.shape.world == 1 else f"rank {rank} of {settings.name}"
        output = settings.directory / "logs" / f"{settings.log(rank)}.out"
        environment = {STACKS_VARIABLE: str(self._stacks), **environment_of_ranks(self.shape), **settings.environment}
        return Worker(
            name, RANK_MODULE, [own.to_json()], threads=Threads(settings.threads), output=output, new_session=True,
            environment=environment, python=settings.python, state=lambda: self._state_of(rank), pass_fds=() if listener is None else (listener,),
            forks=self._forks,
        )  # fmt: skip

    def _state_of(self, rank: int) -> tuple[str, float]:
        state = self._board.states()[rank]
        return state.describe(time.monotonic()), state.beat_s

    def _states(self) -> dict[int, RankState]:
        """Returns the state of every rank of this machine."""
        states = self._board.states()
        return {rank: states[rank] for rank in self.ranks}

    @property
    def alive(self) -> bool:
        return not self._broken and all(worker.alive for worker in self.workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def memory(self) -> list[ProcessMemory]:
        """The memory of each rank and of the processes that it started; zeros for one that has ended."""
        return [memory_of_tree(worker.pid) for worker in self.workers]

    def step_times(self) -> list[RankTimes]:
        """Returns where the time of each rank of this machine has gone so far; none for a single rank."""
        return [each for each in read_step_times(step_times_path(self.settings.folder / "heartbeats")) if each.rank in self.ranks]

    def signal(self, number: signal.Signals) -> None:
        """Sends ``number`` to every running rank."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(number)

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, deadline_s: float, on_progress: Progress | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> Frame:
        """Calls ``name`` on every rank and returns the first one's result. ``on_progress`` receives the first one's progress; ``on_poll`` is called
        every ``POLL_S`` while this waits. Raises ``RanksLost``, ``RpcTimeout``, and what a rank raised."""
        if self._broken:
            raise RanksLost(self.settings.name, name, self._broken)
        if self.shape.world == 1 and on_poll is None:
            return self._call_alone(name, meta, blobs, deadline_s, on_progress)
        progresses: SimpleQueue[dict[str, Any]] = SimpleQueue()
        first = self.ranks[0]
        calls = {
            rank: self._pool.submit(in_context(worker.call), name, meta, blobs, deadline_s=deadline_s, on_progress=progresses.put if rank == first else None)
            for rank, worker in zip(self.ranks, self.workers, strict=True)
        }
        while True:
            if on_poll is not None:
                on_poll()
            # Progress is reported from this thread, in order, before the call returns.
            is_done = all(call.done() for call in calls.values())
            while not progresses.empty():
                progress = progresses.get()
                if on_progress is not None:
                    on_progress(progress)
            if any(call.done() and call.exception() is not None for call in calls.values()):
                self._judge(name, calls)
            if is_done:
                return calls[first].result()
            states = self._states()
            stuck = self._watch.look([*states.values()], PROCESS_CLOCK.look(), PROCESS_CLOCK.resumed_s)
            if stuck:
                self._fail_stuck(name, stuck, states)
            # Ranks finish together: after the first, wait for the others without polling, which would delay the step.
            is_first = not any(call.done() for call in calls.values())
            futures_wait(calls.values(), timeout=POLL_S, return_when=FIRST_COMPLETED if is_first else ALL_COMPLETED)

    def _call_alone(
        self, name: str, meta: Meta | None, blobs: Blobs | None, deadline_s: float, on_progress: Progress | None
    ) -> Frame:
        """Calls the only rank, which needs no watchdog: the call's deadline applies."""
        try:
            return self.workers[0].call(name, meta, blobs, deadline_s=deadline_s, on_progress=on_progress)
        except (WorkerDied, RpcTimeout) as death:
            self._broken = str(death)
            raise

    def _judge(self, name: str, calls: Mapping[int, "Future[Frame]"]) -> None:
        """Raises the error that ended the call: that of a rank which failed itself, not of one whose collective missed another rank."""
        ends = time.monotonic() + GRACE_S
        while time.monotonic() < ends and not all(call.done() for call in calls.values()):
            time.sleep(0.02)
        states = self._states()
        errors = {rank: call.exception() for rank, call in calls.items() if call.done() and call.exception() is not None}
        for rank, error in errors.items():
            if isinstance(error, UserError) and not isinstance(error, CollectiveError):
                raise error
            if isinstance(error, RemoteError):
                log = self.settings.directory / "logs" / f"{self.settings.log(rank)}.log"
                raise RunError(f"rank {rank} failed: {error}; the traceback is in '{log}'") from None
            if isinstance(error, RpcTimeout):
                self._fail(name, f"rank {rank}: {error}", [rank], states.values())
        dead = [rank for rank, error in errors.items() if isinstance(error, WorkerDied)]
        self._write_stacks(states)
        if dead:
            status = {rank: describe_exit(worker.process.poll()) for rank, worker in zip(self.ranks, self.workers, strict=True) if rank in dead}
            text = ", ".join(f"rank {rank} died ({status[rank]}) {_where(states[rank])}" for rank in dead)
            self._fail(name, text, dead, states.values())
        # Every error is about a missing rank: the ranks that are in no collective hang.
        stuck = [state for rank, state in states.items() if not calls[rank].done() and not state.collective]
        text = "; ".join([state.describe(time.monotonic()) for state in stuck] or [str(next(iter(errors.values())))])
        self._fail(name, text, [state.rank for state in stuck], stuck or states.values())

    def _fail_stuck(self, name: str, stuck: Sequence[RankState], states: Mapping[int, RankState]) -> None:
        now, names = time.monotonic(), {state.rank for state in stuck}
        text = "; ".join(state.describe(now) for state in [*stuck, *(state for rank, state in states.items() if rank not in names)])
        self._write_stacks(states)
        self._fail(name, text, sorted(names), stuck)

    def _fail(self, name: str, text: str, ranks: Sequence[int], states: Iterable[RankState]) -> None:
        self._broken = text
        for worker in self.workers:
            kill(worker.process)
        raise RanksLost(self.settings.name, name, text, ranks, min((state.step for state in states if state.rank in ranks), default=0))

    @property
    def _stacks(self) -> Path:
        """The folder for the stacks of the ranks: that of the whole run, if it has one."""
        return Path(os.environ.get(STACKS_VARIABLE) or self.settings.folder / "stacks")

    def _write_stacks(self, states: Mapping[int, RankState]) -> None:
        """Writes the stacks of every running rank to a file, and their innermost frames to ``say``."""
        living = {rank: worker.pid for rank, worker in zip(self.ranks, self.workers, strict=True) if worker.process.poll() is None}
        if not living:
            return
        taken = stacks_of(self._stacks, living.values())
        stacks = {rank: taken[pid] for rank, pid in living.items()}
        path, now = self.settings.directory / "logs" / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{living[min(living)]}.txt", time.monotonic()
        path.write_text("".join(f"{states[rank].describe(now)}\n{text}\n" for rank, text in stacks.items()), encoding="utf-8")
        for rank, text in stacks.items():
            frame = innermost(text)
            self._say(f"rank {rank} is in {frame}" if frame else f"rank {rank} does not answer: it is stopped or has not started")
        self._say(f"the stacks of all ranks are in '{path}'")

    def close(self, grace_s: float = 0.0) -> None:
        """Stops every rank: closes its channel, and kills it after ``grace_s``."""
        self._broken = self._broken or f"{self.settings.name} was stopped"
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(lambda worker: worker.stop(grace_s), self.workers))
        self._pool.shutdown(wait=False)
        self._board.close()
        remove_ended(self._stacks)


def _where(state: RankState) -> str:
    if state.beat_s == 0:
        return "while starting"
    inside = f", in the collective '{state.collective}'" if state.collective else ""
    return f"in '{state.phase}' of step {state.step}{inside}"
