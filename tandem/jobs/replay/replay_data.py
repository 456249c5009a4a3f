"""Replays one step of a run on data: a recorded one on the mesh that it was taken on, or a skipped one on its saved batch.

Works in a folder of its own with links to the run's checkpoints and models. The run's files are only read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.jobs.data_run.supervise import group_settings, run_on_ranks
from tandem.jobs.replay.comparison import Comparison, differences, same_device, scratch_run
from tandem.layout.mesh import MeshShape
from tandem.runtime.callback import Callback
from tandem.runtime.machine.gpus import chosen_device
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.runtime.process.worker_group import GroupForks, GroupSettings, RanksLost, WorkerGroup
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import VOLATILE, read_rows
from tandem.runtime.records.run_lock import RunLock
from tandem.types import RunError, UserError

Say = Callable[[str], None]


def replay_data_step(
    recipe: PretrainRecipe, directory: Path, step: int, *, inline: bool = False, say: Say = lambda line: None, record: Path | None = None
) -> Comparison:
    """Replays ``step`` of the run in ``directory``. If its batch was saved, ``say`` receives the report of where it stops being finite. The folder
    ``record`` receives digests of the tensors.

    Raises ``UserError`` where the step was never taken, no checkpoint before it is left, or this machine or mesh cannot give the same
    bits."""
    with RunLock(directory):
        rows = {row["step"]: row for row in read_rows(directory / "metrics.jsonl")}
        kept = _kept_files(directory, step)
        if not kept and step not in rows:
            recorded = f"the steps {min(rows)} to {max(rows)}" if rows else "no step"
            raise UserError(f"step {step} of '{directory}' was never taken; its metrics have {recorded}")
        _check_checkpoints(directory, step)
        with Journal(directory / "journal.sqlite", read_only=True) as journal:
            facts = {key: journal.get(key) for key in ("data", "reference", "numerics", "mesh", "device")}
            mesh_changes = [event.detail["step"] for event in journal.events() if event.kind == "mesh"]
        shape = MeshShape(**(facts["mesh"] or {}))
        recipe = replace(recipe, machine=same_device(recipe.machine, directory, facts["device"]))
        chosen_device(recipe.machine, shape.world)
        if kept and record is not None:
            raise UserError(f"step {step} of '{directory}' was skipped as not finite, and the replay of its saved batch is not recorded; replay another step")
        if kept:
            return _kept_step(recipe, directory, step, kept, facts, shape, say)
        if mesh_changes and step < mesh_changes[-1]:
            raise UserError(f"step {step} of '{directory}' was taken on another mesh than the run has now; replay a step from {mesh_changes[-1]} on")
        if inline and shape.world > 1:
            raise UserError(f"--inline is one process and this run has {shape.world} ranks; leave --inline out")
        with scratch_run(recipe, directory, facts, record) as scratch:
            _run_again(recipe.machine, recipe.parallel, scratch, shape, step, say)
            replayed = {row["step"]: row for row in read_rows(scratch / "metrics.jsonl")}
        for between in sorted(replayed.keys() & rows.keys() - {step}):
            if differences(_numbers(rows[between]), replayed[between]):
                say(f"step {between}, an earlier one, differs from its record")
        wanted = _numbers(rows[step])
        return Comparison("train", len(wanted), tuple(differences(wanted, replayed[step])))


def _kept_files(directory: Path, step: int) -> list[Path]:
    """Returns the files of the saved batch of ``step``: one, or one for each data-parallel rank, by rank."""
    whole = directory / "skipped" / f"step-{step}.json"
    shares = sorted(directory.glob(f"skipped/step-{step}-share-*-of-*.json"), key=lambda path: int(path.stem.split("-")[3]))
    if whole.exists() or not shares:
        return [whole] if whole.exists() else []
    count = int(shares[-1].stem.split("-")[5])
    if len(shares) != count:
        raise UserError(f"of the {count} shares of the saved batch of step {step}, '{directory / 'skipped'}' has {len(shares)}; restore the others")
    return shares


def _check_checkpoints(directory: Path, step: int) -> None:
    from tandem.trainer.checkpoint.find import committed_steps

    steps = committed_steps(directory / "checkpoints")
    if not steps:
        raise UserError(f"'{directory}' has no checkpoint to replay from; only a run with checkpoints can be replayed")
    if steps[0] > step:
        raise UserError(
            f"no checkpoint at or before step {step} of '{directory}' is left; the oldest is of step {steps[0]}: replay a later step, or keep more "
            "checkpoints with checkpoint.keep"
        )


class _MessageCallback(Callback):
    """Passes messages on to ``say``."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def message(self, text: str) -> None:
        self._say(text)


def _run_again(machine: MachineConfig, parallel: ParallelConfig, scratch: Path, shape: MeshShape, step: int, say: Say) -> None:
    if shape.world > 1:
        _on_ranks(group_settings(machine, parallel, shape.world, scratch, scratch / "ranks"), shape, step, say)
        return
    with _in_this_process(machine.threads, scratch, step, say) as run:
        from tandem.jobs.replay.steps_again import run_again

        run_again(run, step)


@contextmanager
def _in_this_process(threads: int, scratch: Path, at_most: int, say: Say) -> Iterator[Any]:
    # A controller of ranks runs without torch.
    from tandem.config.recipe import load_config
    from tandem.jobs.data_run.start_data import opened_run, this_process

    quiet = load_config(scratch / "config.yaml")
    assert isinstance(quiet, PretrainRecipe)
    quiet = replace(quiet, machine=replace(quiet.machine, threads=threads))
    with opened_run(this_process(quiet.machine, scratch), quiet, _MessageCallback(say), at_most=at_most) as run:
        yield run


def _on_ranks(settings: GroupSettings, shape: MeshShape, step: int, say: Say) -> None:
    with SignalRequests() as requests, closing(GroupForks()) as forks:
        try:
            run_on_ranks(lambda: WorkerGroup(settings, shape, say=say, forks=forks), _MessageCallback(say), requests, "replay", lambda: {"step": step})
        except RanksLost as loss:
            if requests.stop:
                raise KeyboardInterrupt from None
            raise RunError(f"{loss}; the run was not changed; start the replay again") from None
    if requests.stop:
        raise KeyboardInterrupt


def _kept_step(
    recipe: PretrainRecipe, directory: Path, step: int, kept: Sequence[Path], facts: Mapping[str, Any], shape: MeshShape, say: Say
) -> Comparison:
    """Replays the step whose batch is in ``kept``, in one process. Its numbers are bit-identical to the run's if that was one process too."""
    from tandem.jobs.replay.steps_again import run_again, take_kept
    from tandem.trainer.bad_batch import read_batch, read_metrics

    # The report reads weights and gradients one by one, so they must be in memory; that does not change results.
    recipe = replace(recipe, trainer=replace(recipe.trainer, offload_parameters="none"))
    is_one = shape.world == 1 and len(kept) == 1
    if not is_one:
        say(f"the run has {shape.world} ranks and the replay has one process: results will not be bit-identical")
        recipe, facts = replace(recipe, parallel=ParallelConfig()), {name: facts[name] for name in ("data", "reference")}
    shares = [read_batch(path) for path in kept]
    if len(shares) > 1:
        shares = [[replace(s, id=f"{s.id} of rank {rank}'s share") for s in share] for rank, share in enumerate(shares)]
    recorded = read_metrics(kept[0])
    with scratch_run(recipe, directory, facts) as scratch, _in_this_process(recipe.machine.threads, scratch, step, say) as run:
        run_again(run, step - 1)
        result, lines = take_kept(run, step, shares)
    for line in lines:
        say(line)
    if is_one:
        return Comparison("train", len(recorded), tuple(differences(_numbers(recorded), result.metrics)))
    names = ("train/loss", "actor/grad_norm")
    apart = [name for name in names if math.isfinite(recorded[name]) != math.isfinite(result.metrics[name])]
    apart_lines = tuple(f"{name}: recorded {recorded[name]!r}, now {result.metrics[name]!r}" for name in apart)
    return Comparison("train", len(names), apart_lines, "finite or not as recorded")


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a row that are a function of the run's inputs."""
    return {name: value for name, value in row.items() if not name.startswith(VOLATILE)}
