"""Runs a job on data in several processes: starts the ranks, and restarts them when one dies or hangs. Imports no torch."""

import logging
import shutil
import signal
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.data_run.rank_events import tell
from tandem.jobs.result import RunResult
from tandem.jobs.run_files import begun
from tandem.layout.mesh import MeshShape, smaller
from tandem.layout.placement import mesh_of
from tandem.runtime.callback import Callback
from tandem.runtime.machine.gpus import chosen_device
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.processes import available_cores
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.process.worker_group import GroupSettings, RanksLost, WorkerGroup
from tandem.runtime.records.journal import Journal
from tandem.types import RunError

logger = logging.getLogger(__name__)


def supervise(
    recipe: PretrainRecipe, directory: Path, callback: Callback, resumed: bool = False, faults: FaultPlan | None = None
) -> RunResult:
    """Runs ``recipe`` in ``directory`` on its mesh, from the newest whole checkpoint if there is one.

    If a rank dies or hangs, all ranks are restarted from the newest checkpoint: on the same mesh, or on one with fewer data-parallel ranks
    if the same rank was lost twice with no step completed in between. Raises ``RunError`` after ``run.max_restarts`` restarts."""
    with ExitStack() as stack:
        stack.enter_context(begun(directory, "controller", callback, recipe.run.max_steps))
        folder = Path(mkdtemp(prefix="tandem-ranks-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        requests = stack.enter_context(SignalRequests(callback.message))
        shape, before, restarts = mesh_of(recipe.parallel), None, 0
        while True:
            try:
                settings = group_settings(recipe.machine, recipe.parallel, shape, directory, folder / str(restarts), faults)
                reply = run_on_ranks(settings, shape, callback, requests, "train", {"resumed": resumed or restarts > 0})
                return RunResult.from_json(reply["result"])
            except RanksLost as loss:
                if requests.stop:
                    raise KeyboardInterrupt from None
                if restarts == recipe.run.max_restarts:
                    raise RunError(
                        f"{loss}; run.max_restarts is {restarts}, so the ranks are not restarted again; see '{directory / 'logs'}', then resume"
                    ) from None
                restarts += 1
                is_again = before is not None and before.step == loss.step and bool(set(before.ranks) & set(loss.ranks))
                shape, before = _recover(shape, loss, is_again, directory, callback), loss


def group_settings(
    machine: MachineConfig, parallel: ParallelConfig, shape: MeshShape, directory: Path, folder: Path, faults: FaultPlan | None = None
) -> GroupSettings:
    """Returns how the ranks of ``shape`` are started for the run in ``directory``; they share the machine's threads. ``folder``: for the
    files that they meet by."""
    threads = max(1, (machine.threads or available_cores()) // shape.world)
    return GroupSettings(
        "the run", "tandem.jobs.data_run.data_rank", directory, folder, threads, chosen_device(machine, shape.world), str(faults or ""),
        parallel.collective_timeout_s, parallel.heartbeat_timeout_s,
    )  # fmt: skip


def run_on_ranks(
    settings: GroupSettings, shape: MeshShape, callback: Callback, requests: SignalRequests, call: str, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Starts the ranks of ``shape``, calls ``call`` on them and returns rank 0's reply. Passes the signals in ``requests`` on to the ranks.
    Raises ``RanksLost``, and what a rank raises."""
    is_told = False

    def pass_on() -> None:
        nonlocal is_told
        if requests.save:
            group.signal(signal.SIGUSR1)
        if requests.stop and not is_told:
            group.signal(signal.SIGTERM)
        requests.save, is_told = False, is_told or requests.stop

    with closing(WorkerGroup(settings, shape, say=callback.message)) as group:
        reply = group.call(call, meta, deadline_s=float("inf"), on_progress=lambda progress: tell(callback, progress), on_poll=pass_on).meta
    if reply.get("stopped"):
        raise KeyboardInterrupt
    return dict(reply)


def _recover(shape: MeshShape, loss: RanksLost, is_again: bool, directory: Path, callback: Callback) -> MeshShape:
    """Journals the loss of ranks and returns the mesh to continue with."""
    fewer = smaller(shape) if is_again else None
    with Journal(directory / "journal.sqlite") as journal:
        detail = {"role": "ranks", "reason": str(loss), "ranks": list(loss.ranks), "step": loss.step, "mesh": asdict(fewer or shape)}
        journal.record_event("recovery", detail)
    what = "restarting all ranks from the newest checkpoint"
    if fewer is not None:
        what = f"lost twice with no step completed in between: continuing from the newest checkpoint with {fewer.data} data-parallel ranks"
    callback.message(f"{loss}; {what}")
    return fewer or shape
