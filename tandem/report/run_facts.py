"""Reads what a page shows from the journal and the recipe of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.config.leaves import default_values, leaves
from tandem.config.load import to_mapping
from tandem.config.parallel import ScheduleName
from tandem.config.recipe import AnyRecipe, Recipe, load_config
from tandem.runtime.records.checkpoint_tiers import TierState, read_tiers
from tandem.runtime.records.elastic import describe_fewer_ranks, fewer_ranks
from tandem.runtime.records.journal import Journal
from tandem.types import UserError

Row = Mapping[str, Any]
REPORT = "report.html"
"""The name of the page of a run in the run's folder."""
NODE_KEY = "node"
"""The journal's key of the machine that the run's controller is on."""
RESULT_KEY = "result"
"""The journal's key of the result of a run that has finished."""
PHASES_KEY = "phases"
"""The journal's key of a finished run's predicted and measured phases (``report.phases.PhaseFigures``)."""
PREDICTION_KEY = "prediction"
"""The journal's key of the predicted seconds by phase, for each of the lengths of completions that it was made for."""


PREDICTED = {"train": "trainer", "rollout": "rollout", "wait_rollout": "trainer_idle", "inference": "inference"}
"""The field of ``PodMemory`` that predicts each measured phase."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The content of a page.

    Args:
        examples_before, examples_after: lists of {prompt, completion, correct}.
        order: the pipeline's schedule.
        note: how the run differs from its recipe.
        recipe: the resolved recipe by dotted key, ``None`` where it cannot be read; ``defaults``: the default of each key that has one.
        ended: optimizer steps after which the run has finished, ``None`` while it has not.
        target: the held-out accuracy that the run trains to; ``reached``: whether the finished run reached it.
        tiers: of checkpoints, the nearest first.
        phases: the fields of ``report.phases.PhaseFigures`` of each phase, once the run has finished.
    """

    name: str
    rows: Sequence[Row]
    evaluations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    predicted_memory: Mapping[str, float]
    examples_before: Sequence[Mapping[str, Any]]
    examples_after: Sequence[Mapping[str, Any]]
    commands: Sequence[str]
    headline: str
    order: ScheduleName = "1f1b"
    note: str = ""
    recipe: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ended: int | None = None
    target: float | None = None
    reached: bool | None = None
    tiers: Sequence[TierState] = ()
    phases: Sequence[Mapping[str, Any]] = ()

    @property
    def is_data(self) -> bool:
        """Whether the run was on data: pretraining or supervised fine-tuning."""
        return any("train/loss" in row for row in self.rows)


def facts_of(directory: Path, journal: Journal, rows: Sequence[Row]) -> RunFacts:
    """Returns what the journal and the recipe of a run say. ``rows``: of its metrics all, or the last."""
    evaluations = [{"step": step, "kind": kind, **result} for step, kind, result in journal.evaluations()]
    recorded = journal.events()
    events = [{"kind": event.kind, "detail": event.detail, "time_s": event.time_s} for event in recorded]
    commands, result = journal.get("commands", []), journal.get(RESULT_KEY) or {}
    recipe = _read_recipe(directory)
    sampled = [e for e in evaluations if e["kind"] == "sampled"]
    return RunFacts(
        name=directory.resolve().name,
        rows=rows,
        evaluations=evaluations,
        events=events,
        predicted_memory=predicted_memory(journal),
        phases=journal.get(PHASES_KEY) or [],
        examples_before=sampled[0].get("examples", []) if sampled else [],
        examples_after=sampled[-1].get("examples", []) if sampled else [],
        commands=commands,
        headline=_headline(evaluations),
        order=recipe.parallel.schedule if recipe is not None else "1f1b",
        note=describe_fewer_ranks(fewer_ranks(recorded)),
        recipe=None if recipe is None else dict(leaves(to_mapping(recipe))),
        defaults={} if recipe is None else dict(leaves(default_values(recipe))),
        ended=result.get("steps") if rows and result.get("steps") == rows[-1]["step"] + 1 else None,
        target=recipe.evaluation.target_accuracy if isinstance(recipe, Recipe) else None,
        reached=result.get("reached"),
        tiers=read_tiers(journal),
    )


def predicted_memory(journal: Journal) -> dict[str, float]:
    """Returns the predicted bytes of each measured phase."""
    memory = journal.get("memory", {})
    return {phase: memory[name] for phase, name in PREDICTED.items() if memory.get(name)}


def _read_recipe(directory: Path) -> AnyRecipe | None:
    """Returns the recipe of the run, ``None`` where another version wrote it: the curves do not depend on it."""
    path = directory / "config.yaml"
    try:
        return _loaded(path, path.stat().st_mtime_ns, path.stat().st_size)
    except (UserError, OSError):
        return None


@lru_cache(maxsize=32)
def _loaded(path: Path, changed_ns: int, size: int) -> AnyRecipe:
    """Returns the recipe in ``path``, which is read again when it was written again."""
    return load_config(path)


def _headline(evaluations: Sequence[Mapping[str, Any]]) -> str:
    held_out = [e for e in evaluations if e["kind"] == "held_out"]
    if held_out:
        first, last = held_out[0], held_out[-1]
        return f"held-out loss {first['loss']:.4f} before, {last['loss']:.4f} (perplexity {last['perplexity']:.2f}) after {last['step']} steps"
    pairs = [e for e in evaluations if e["kind"] == "held_out_pairs"]
    if pairs:
        first, last = pairs[0], pairs[-1]
        accuracy = f"accuracy {first['accuracy']:.3f} before, {last['accuracy']:.3f}"
        return f"held-out loss {first['loss']:.4f} before, {last['loss']:.4f}, {accuracy} of {last['pairs']} pairs after {last['step']} steps"
    drafts = [e for e in evaluations if "acceptance_length" in e]
    if drafts:
        first, last = drafts[0], drafts[-1]
        length = f"acceptance length {first['acceptance_length']:.2f} before, {last['acceptance_length']:.2f} tokens"
        return f"held-out loss {first['loss']:.4f} before, {last['loss']:.4f}, {length} after {last['step']} steps"
    by_kind = {kind: [e for e in evaluations if e["kind"] == kind] for kind in ("sampled", "greedy", "final", "final_greedy")}
    said = []
    if by_kind["sampled"]:
        said.append(f"held-out sampled accuracy {by_kind['sampled'][0]['accuracy']:.3f} before")
    for kind, words in (("final", "sampled"), ("final_greedy", "greedy")):
        if by_kind[kind]:
            last = by_kind[kind][-1]
            said.append(f"{last['accuracy']:.3f} {words} on {last['count']} fresh prompts after {last['step']} steps")
    return "; ".join(said) or "This run has not been evaluated yet."
