"""Replays one recorded step of a run of any job and compares every number with its record. The run's files are only read; what
was found is added to its ``replays.jsonl``."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tandem
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe
from tandem.jobs.prepare import read_recipe
from tandem.jobs.replay.comparison import PARTS, Comparison, Part
from tandem.jobs.replay.replay_data import replay_data_step
from tandem.jobs.replay.replay_rl import replay_rl_step
from tandem.runtime.callback import Callback
from tandem.runtime.records.replays import FILE, add_replay
from tandem.runtime.records.tensor_digests import COMPLETE
from tandem.types import UserError

_MOST_DIFFERENCES = 20


def replay(
    run_directory: str | Path, step: int, parts: Sequence[Part] = PARTS, *, inline: bool = False, callback: Callback | None = None,
    say: Callable[[str], None] = lambda line: None, record: Path | None = None,
) -> list[Comparison]:
    """Replays ``parts`` of ``step`` of the run in ``run_directory``. ``say`` receives a line for each stage, the folder ``record`` digests of the tensors.

    Raises ``UserError`` where the step was not recorded, or this machine cannot give the same bits. Steps of a run on data have the part
    ``train`` only."""
    directory = Path(run_directory)
    recipe = read_recipe(directory)
    if record is not None:
        if record.exists():
            raise UserError(f"'{record}' exists; name a folder that does not")
        record.mkdir(parents=True)
    comparisons = _replay(recipe, directory, step, parts, inline, callback or Callback(), say, record)
    if record is not None:
        (record / COMPLETE).touch()
    why = add_replay(directory, _found(step, comparisons))
    if why:
        say(f"what was found is not added to '{directory / FILE}': {why}")
    return comparisons


def _found(step: int, comparisons: Sequence[Comparison]) -> Mapping[str, Any]:
    parts = [
        {"part": each.part, "count": each.count, "unequal": len(each.differences), "how": each.how, "differences": list(each.differences[:_MOST_DIFFERENCES])}
        for each in comparisons
    ]
    return {"time_s": time.time(), "step": step, "version": tandem.__version__, "parts": parts}


def _replay(
    recipe: AnyRecipe, directory: Path, step: int, parts: Sequence[Part], inline: bool, callback: Callback, say: Callable[[str], None], record: Path | None
) -> list[Comparison]:
    if not isinstance(recipe, PretrainRecipe):
        return replay_rl_step(recipe, directory, step, parts, inline=inline, callback=callback, say=say, record=record)
    if "train" not in parts:
        raise UserError(f"'{directory}' is a run on data, whose steps have one part, 'train'; leave --only {parts[0]} out")
    return [replay_data_step(recipe, directory, step, inline=inline, say=say, record=record)]
