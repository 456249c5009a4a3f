"""Pretraining in several processes: start the ranks, watch them, and start them again when one dies or hangs. Imports no torch."""

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.pretrain_rank import RankSettings
from tandem.jobs.pretrain_result import PretrainResult
from tandem.jobs.rank_events import EventReader, tell
from tandem.layout.mesh import MeshShape, smaller
from tandem.layout.placement import mesh_of
from tandem.runtime.faults import FaultPlan
from tandem.runtime.gpus import chosen_device
from tandem.runtime.journal import Journal
from tandem.runtime.listener import Listener
from tandem.runtime.logs import setup
from tandem.runtime.processes import Threads, available_cores, describe_exit, kill, spawn, wait
from tandem.runtime.rank_board import RankBoard, RankState
from tandem.runtime.requests import SignalRequests
from tandem.runtime.run_lock import RunLock
from tandem.runtime.stacks import innermost, stacks_of
from tandem.runtime.stall_watch import StallWatch
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
POLL_S = 0.1
GRACE_S = 2.0
"""After a rank ended badly: how long the others have to show who ended first."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why ranks must be started again: ``text`` names who, ``ranks`` are those; ``step``: the one that they were in."""

    text: str
    ranks: tuple[int, ...]
    step: int


def supervise(
    recipe: PretrainRecipe, directory: Path, listener: Listener, resumed: bool = False, faults: FaultPlan | None = None
) -> PretrainResult:
    """Run ``recipe`` in ``directory`` on its mesh, from the newest whole checkpoint where there is one.

    Where a rank dies or hangs, all are started again from the newest checkpoint: on the same mesh, or on one with fewer data-parallel
    ranks where the same rank was lost twice and no step was completed in between. Raises ``RunError`` past ``run.max_restarts``."""
    with ExitStack() as stack:
        stack.enter_context(RunLock(directory))
        setup("controller", directory / "logs")
        folder = Path(mkdtemp(prefix="tandem-ranks-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        listener.started(str(directory), recipe.run.max_steps, None)
        requests = stack.enter_context(SignalRequests(listener.message))
        shape, before, restarts = mesh_of(recipe.parallel), None, 0
        while True:
            with closing(RankProcesses(recipe, directory, shape, folder, restarts, resumed or restarts > 0, faults)) as ranks:
                found = ranks.watch(listener, requests)
            if not isinstance(found, Loss):
                return PretrainResult.from_json(found)
            if requests.stop:
                raise KeyboardInterrupt
            if restarts == recipe.run.max_restarts:
                raise RunError(f"{found.text}; run.max_restarts ({restarts}) is used up; see '{directory / 'logs'}', then resume")
            restarts += 1
            is_again = before is not None and before.step == found.step and bool(set(before.ranks) & set(found.ranks))
            shape, before = _recover(shape, found, is_again, directory, listener), found


def _recover(shape: MeshShape, loss: Loss, is_again: bool, directory: Path, listener: Listener) -> MeshShape:
    """Write down that ranks were lost; the mesh to go on with."""
    fewer = smaller(shape) if is_again else None
    with Journal(directory / "journal.sqlite") as journal:
        detail = {"role": "ranks", "reason": loss.text, "ranks": list(loss.ranks), "step": loss.step, "mesh": asdict(fewer or shape)}
        journal.record_event("recovery", detail)
    what = "starting all ranks again from the newest checkpoint"
    if fewer is not None:
        what = f"lost twice without a step between: going on from the newest checkpoint with {fewer.data} data-parallel ranks"
    listener.message(f"{loss.text}; {what}")
    return fewer or shape


class RankProcesses:
    """The ranks of one start. ``again``: the recorded step that they run again, instead of a run."""

    def __init__(
        self, recipe: PretrainRecipe, directory: Path, shape: MeshShape, folder: Path, start: int, resumed: bool, faults: FaultPlan | None,
        again: int | None = None,
    ) -> None:
        self._directory, self._folder, self._start = directory, folder, start
        self._board = RankBoard(folder / "board", shape.world)
        self._board.clear()
        self._watch = StallWatch(recipe.parallel.collective_timeout_s, recipe.parallel.heartbeat_timeout_s)
        threads = max(1, (recipe.machine.threads or available_cores()) // shape.world)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[EventReader] = []
        self._ended: dict[int, list[Any]] = {}
        self._is_told = False
        for rank in range(shape.world):
            read, write = os.pipe()
            settings = RankSettings(
                str(directory), rank, asdict(shape), str(folder / f"meeting-{start}"), str(folder / "board"), str(self._stacks(rank)), write,
                threads, resumed, str(faults or ""), again, chosen_device(recipe.machine, shape.world),
            )  # fmt: skip
            output = directory / "logs" / f"rank-{rank}.log"
            process = spawn(
                "tandem.jobs.pretrain_rank", [settings.to_json()], threads=Threads(threads), output=output, pass_fds=[write], new_session=True
            )
            os.close(write)
            self._processes.append(process)
            self._readers.append(EventReader(read))

    def watch(self, listener: Listener, requests: SignalRequests) -> dict[str, Any] | Loss:
        """Until all have ended well, or one is lost; what it has come to, as the first rank says it. What is asked meanwhile is passed on to the
        ranks. Raises what a rank says that the user can mend, or cannot."""
        while True:
            self._pass_on(requests)
            self._hear(listener)
            states = self._board.states()
            bad = [rank for rank, process in enumerate(self._processes) if process.poll() not in (None, 0)]
            if bad:
                return self._judge(listener)
            if all(process.poll() == 0 for process in self._processes):
                self._hear(listener)
                return self._ended[0][1] or {}
            stuck = self._watch.look(states, time.monotonic())
            if stuck:
                return self._stuck(stuck, states, listener)
            time.sleep(POLL_S)

    def _pass_on(self, requests: SignalRequests) -> None:
        wanted = [signal.SIGUSR1] * requests.save + [signal.SIGTERM] * (requests.stop and not self._is_told)
        requests.save, self._is_told = False, self._is_told or requests.stop
        for number in wanted:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)

    def _hear(self, listener: Listener) -> None:
        for rank, reader in enumerate(self._readers):
            for event in reader.read():
                if event[0] == "ended":
                    self._ended[rank] = event[1:]
                else:
                    tell(listener, event)

    def _judge(self, listener: Listener) -> Loss:
        """Who ended first: those who did not say that another was missing."""
        ends = time.monotonic() + GRACE_S
        while time.monotonic() < ends and any(process.poll() is None for process in self._processes):
            time.sleep(0.02)
            self._hear(listener)
        self._hear(listener)
        states = self._board.states()
        for rank in sorted(self._ended):
            kind, text, exit_code = self._ended[rank]
            if kind == "stopped":
                raise KeyboardInterrupt
            if kind == "error":
                raise (UserError if exit_code == 2 else RunError)(text)
            if kind == "defect":
                raise RunError(f"rank {rank} failed: {text}; the traceback is in '{self._directory / 'logs' / f'rank-{rank}.log'}'")
        silent = [r for r, process in enumerate(self._processes) if process.poll() not in (None, 0) and r not in self._ended]
        self._write_stacks(listener, states)
        if silent:
            named = ", ".join(f"rank {r} died ({describe_exit(self._processes[r].poll())}) {_where(states[r])}" for r in silent)
            return Loss(named, tuple(silent), min(states[r].step for r in silent))
        # Every one that ended says that a collective did not: whoever is not in it, or is behind, is stuck.
        stuck = [state for state in states if self._processes[state.rank].poll() is None and not state.collective]
        said = next(text for kind, text, _ in self._ended.values() if kind == "collective")
        text = "; ".join([state.describe(time.monotonic()) for state in stuck] or [said])
        return Loss(text, tuple(state.rank for state in stuck), min(state.step for state in stuck or states))

    def _stuck(self, stuck: Sequence[RankState], states: Sequence[RankState], listener: Listener) -> Loss:
        now = time.monotonic()
        names = {state.rank for state in stuck}
        others = [state.describe(now) for state in states if state.rank not in names]
        text = "; ".join([*(state.describe(now) for state in stuck), *others])
        self._write_stacks(listener, states)
        return Loss(text, tuple(sorted(names)), min(state.step for state in stuck))

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-{self._start}-{rank}"

    def _write_stacks(self, listener: Listener, states: Sequence[RankState]) -> None:
        """Ask every rank that lives for its stacks; all of them go to a file, the innermost frames to the listener."""
        living = {state.rank: process.pid for state, process in zip(states, self._processes, strict=True) if process.poll() is None}
        if not living:
            return
        found = stacks_of({rank: (pid, self._stacks(rank)) for rank, pid in living.items()})
        path, now = self._directory / "logs" / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{self._start}.txt", time.monotonic()
        path.write_text("".join(f"{states[rank].describe(now)}\n{text}\n" for rank, text in found.items()), encoding="utf-8")
        for rank, text in found.items():
            frame = innermost(text)
            listener.message(f"rank {rank} stands in {frame}" if frame else f"rank {rank} does not answer: it is stopped, or has not begun")
        listener.message(f"the stacks of all ranks are in '{path}'")

    def close(self) -> None:
        """End what is left."""
        for process in self._processes:
            if wait(process, 0.0) is None:
                kill(process)
        for reader in self._readers:
            reader.close()


def _where(state: RankState) -> str:
    if state.beat_s == 0:
        return "in its start"
    inside = f", in the collective '{state.collective}'" if state.collective else ""
    return f"in '{state.phase}' of step {state.step}{inside}"

