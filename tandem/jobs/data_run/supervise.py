"""Runs a job on data in several processes: starts the ranks, and restarts them when one dies or hangs. Imports no torch."""

import logging
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.data_run.rank_events import tell
from tandem.jobs.distrust import distrust
from tandem.jobs.result import RunResult
from tandem.jobs.run_files import RunStopped, begun
from tandem.layout.mesh import MeshShape, smaller
from tandem.layout.placement import mesh_of
from tandem.runtime.callback import Callback
from tandem.runtime.machine.gpus import chosen_device
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.processes import available_cores
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.process.worker_group import GroupForks, GroupSettings, RanksLost, WorkerGroup
from tandem.runtime.records.elastic import FEWER_RANKS
from tandem.runtime.records.journal import Journal
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcesses
from tandem.trainer.corruption.finding import CorruptionFinding, SilentCorruption
from tandem.types import RunError

if TYPE_CHECKING:
    from tandem.jobs.data_run.several_machines import MachineRanks

logger = logging.getLogger(__name__)
RANKS_FOLDER = "ranks"
"""The folder, in that of the run, by which its ranks meet. Only the holder of the run's lock uses it."""

ALL_HERE = (
    "checkpoint.memory_every_steps: all ranks of this run, and the memory that keeps their checkpoints, are on one machine: a loss of processes needs no disk, "
    "a loss of the machine needs checkpoint.upload or a run's folder elsewhere"
)


def supervise(
    recipe: PretrainRecipe, directory: Path, callback: Callback, resumed: bool = False, faults: FaultPlan | None = None, *, is_stage: bool = False
) -> RunResult:
    """Runs ``recipe`` in ``directory`` on its mesh, from the newest whole checkpoint if there is one.

    If a rank dies or hangs, all ranks are restarted from the newest checkpoint on the same mesh, after a wait if it happens again at the same step
    (``Backoff``). With ``run.elastic`` the restart has fewer data-parallel ranks if the same rank was lost twice with no step completed in between.
    With ``pods.trainer_count`` the ranks are on several machines (``several_machines``), whose loss is one of their ranks; one that leaves costs a restart from
    the step that it saves, which does not count.
    After silent data corruption they are restarted from the newest checkpoint that is trusted (``jobs.distrust``).
    Raises ``RunError`` after ``run.max_restarts`` restarts. ``is_stage``: another stage of the same command follows, so a request to stop that came after the
    last step raises ``KeyboardInterrupt``."""
    with ExitStack() as stack:
        stack.enter_context(begun(directory, "controller", callback, recipe.run.max_steps))
        folder = directory / RANKS_FOLDER
        # What a supervisor left that was killed.
        shutil.rmtree(folder, ignore_errors=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        memory = None
        if recipe.checkpoint.memory_every_steps and recipe.pods.trainer_count == 1:
            ranks, each = mesh_of(recipe.parallel).world, recipe.parallel.ranks_per_node
            memory = stack.enter_context(closing(KeeperProcesses(ranks, each or ranks, directory)))
            callback.message(ALL_HERE)
        requests = stack.enter_context(SignalRequests(callback.message, callback.wants_stop))
        forks = stack.enter_context(closing(GroupForks()))
        shape, before, restarts, backoff = mesh_of(recipe.parallel), None, 0, Backoff()
        machines, goes_on = None, resumed
        if recipe.pods.trainer_count > 1:
            # Ranks of one machine need no pods.
            from tandem.jobs.data_run.several_machines import ranks_of_machines
            from tandem.pod.own_ranks import OwnRanks

            of_own = group_settings(recipe.machine, recipe.parallel, recipe.ranks_here, directory, folder, faults)
            own = OwnRanks(of_own, shape, callback.message, forks)
            machines = stack.enter_context(ranks_of_machines(recipe, directory, own, callback, requests))

        def start(shape: MeshShape, number: int) -> "WorkerGroup | MachineRanks":
            if machines is not None:
                return machines
            settings = group_settings(recipe.machine, recipe.parallel, shape.world, directory, folder / str(number), faults)
            return WorkerGroup(settings, shape, say=callback.message, forks=forks)

        def meta(goes_on: bool) -> dict[str, Any]:
            return {"resumed": goes_on, "memory": memory.start() if memory is not None else None}

        while True:
            try:
                begin, told = partial(start, shape, restarts), partial(meta, goes_on)
                goes_on = True
                reply = run_on_ranks(begin, callback, requests, "train", told)
                if is_stage and requests.stop:
                    raise KeyboardInterrupt
                return RunResult.from_json(reply["result"])
            except RunStopped:
                leaving = [] if machines is None or requests.stop else machines.let_go()
                if not leaving:
                    raise
                callback.message(f"{' and '.join(leaving)}: the run goes on from the step that was saved when other pods have those ranks")
            except SilentCorruption as corruption:
                is_replaced = machines is not None and machines.replaces(corruption.finding)
                restarts, trusted = distrust(
                    directory, corruption.finding, recipe.checkpoint, callback, restarts, recipe.run.max_restarts, is_replaced=is_replaced
                )
                if memory is not None:
                    memory.drop_after(trusted)
            except RanksLost as loss:
                if requests.stop:
                    raise KeyboardInterrupt from None
                if restarts == recipe.run.max_restarts:
                    raise RunError(
                        f"{loss}; run.max_restarts is {restarts}, so the ranks are not restarted again; see '{directory / 'logs'}', then resume"
                    ) from None
                restarts += 1
                is_again = before is not None and before.step == loss.step and bool(set(before.ranks) & set(loss.ranks))
                fewer = smaller(shape) if is_again and recipe.run.elastic else None
                wait_s = backoff.wait_s(loss.step)
                how = f"{describe_wait(wait_s)} (restart {restarts} of {recipe.run.max_restarts})"
                _record_loss(shape, fewer, recipe.parallel.data, loss, how, directory, callback)
                _wait(wait_s, requests)
                shape, before = fewer or shape, loss


def group_settings(
    machine: MachineConfig, parallel: ParallelConfig, ranks: int, directory: Path, folder: Path, faults: FaultPlan | None = None
) -> GroupSettings:
    """Returns how the ``ranks`` of this machine are started for the run in ``directory``; they share the machine's threads. ``folder``: for the
    files that they meet by."""
    threads = max(1, (machine.threads or available_cores()) // ranks)
    return GroupSettings(
        "the run", "tandem.jobs.data_run.data_rank", directory, folder, threads, chosen_device(machine, ranks), str(faults or ""),
        parallel.collective_timeout_s, parallel.heartbeat_timeout_s, forked=machine.fork_workers,
    )  # fmt: skip


def run_on_ranks(
    start: "Callable[[], WorkerGroup | MachineRanks]", callback: Callback, requests: SignalRequests, call: str, meta: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Calls ``call`` on the ranks that ``start`` starts with ``meta``, which is made meanwhile, and returns rank 0's reply when they have ended. Passes the
    signals in ``requests`` on to the ranks. Raises ``RanksLost``, ``SilentCorruption``, ``RunStopped`` and what a rank raises."""
    is_told = False

    def pass_on() -> None:
        nonlocal is_told
        if requests.save:
            group.signal(signal.SIGUSR1)
        if requests.stop and not is_told:
            group.signal(signal.SIGTERM)
        requests.save, is_told = False, is_told or requests.stop

    with closing(start()) as group:
        reply = group.call(call, meta(), deadline_s=float("inf"), on_progress=lambda progress: tell(callback, progress), on_poll=pass_on).meta
    if reply.get("stopped"):
        raise RunStopped
    if "corruption" in reply:
        raise SilentCorruption(CorruptionFinding.from_json(reply["corruption"]))
    return dict(reply)


def _record_loss(
    shape: MeshShape, fewer: MeshShape | None, asked: int, loss: RanksLost, how: str, directory: Path, callback: Callback
) -> None:
    """Journals and reports the loss of ranks of ``shape``. ``fewer``: the mesh to continue with (``None``: the same). ``asked``: the data-parallel
    ranks of the recipe. ``how``: when."""
    with Journal(directory / "journal.sqlite") as journal:
        detail = {"role": "ranks", "reason": str(loss), "ranks": list(loss.ranks), "step": loss.step, "mesh": asdict(fewer or shape)}
        journal.record_event("recovery", detail)
        if fewer is not None:
            journal.record_event(FEWER_RANKS, {"step": loss.step, "asked": asked, "now": fewer.data, "ranks": list(loss.ranks)})
    what = f"restarting all ranks from the newest checkpoint {how}"
    if fewer is not None:
        what = (
            "lost twice with no step completed in between and run.elastic is true: continuing from the newest checkpoint with "
            f"{fewer.data} data-parallel ranks instead of {asked} {how}"
        )
    callback.message(f"{loss}; {what}")


def _wait(seconds: float, requests: SignalRequests) -> None:
    """Sleeps for ``seconds``. Raises ``KeyboardInterrupt`` when the run is asked to stop."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if requests.stop:
            raise KeyboardInterrupt
        time.sleep(0.05)
