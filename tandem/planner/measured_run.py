"""What a run of reinforcement learning has measured that a recipe does not say: of the plan of a step. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tandem.config.recipe import Recipe, load_config
from tandem.estimate.packed_samples import Samples, begun_share, sharing_of
from tandem.estimate.prompt_beginnings import Common, Prompts
from tandem.layout.shapes import ModelShapes
from tandem.report.run_facts import PREDICTION_KEY
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows
from tandem.types.errors import UserError

NEWEST = 10
"""Steps of a run whose means are taken: lengths and drafts change while a policy learns."""
HALVINGS = 60
"""Of the interval in which an acceptance is searched: more than a float has bits."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Of the newest steps of a run: its ``prompts``, the mean ``response_tokens``, the ``draft_acceptance`` of one draft token after those before it (``None``:
    nothing was drafted), and the share of its completions' tokens with which another one of the group begins (``packed_samples.Samples.begun``; 0 also of a
    run that did not compute them once)."""

    prompts: Prompts
    response_tokens: float
    draft_acceptance: float | None
    begun: float


def read_measured_run(folder: str, shapes: ModelShapes) -> MeasuredRun:
    """Returns what the run in ``folder`` has measured, whose model is about as large as one of ``shapes``. Raises ``UserError`` if it is none of reinforcement
    learning, or has no step yet."""
    path = Path(folder)
    fix = "name the folder of a run of reinforcement learning that has taken a step"
    if not (path / "config.yaml").is_file() or not (path / "journal.sqlite").is_file():
        raise UserError(f"--measured is '{folder}', which is no folder of a run; {fix}")
    recipe, rows = load_config(path / "config.yaml"), read_rows(path / "metrics.jsonl")
    with Journal(path / "journal.sqlite", read_only=True) as journal:
        known = (journal.get(PREDICTION_KEY) or {}).get("prompts")
    if not isinstance(recipe, Recipe) or not rows or known is None:
        raise UserError(f"--measured is '{folder}', which has measured no step of reinforcement learning; {fix}")
    return measured_run(recipe, shapes, rows, prompts_from(known))


def measured_run(recipe: Recipe, shapes: ModelShapes, rows: Sequence[Mapping[str, Any]], prompts: Prompts) -> MeasuredRun:
    """Returns what the ``rows`` of ``metrics.jsonl`` of a run of ``recipe``, at least one, say beside its ``prompts``."""
    newest = rows[-NEWEST:]
    tokens = fmean(row["response_length/mean"] for row in newest)
    once = [row["perf/shared_prompt_share"] for row in newest if "perf/shared_prompt_share" in row]
    sharing = sharing_of(shapes, recipe.trainer, recipe.parallel, recipe.replays_routing(shapes.experts is not None))
    count = recipe.rollout.prompts_per_step / recipe.algorithm.minibatches
    samples = Samples(prompts, count, recipe.algorithm.group_size, tokens, tokens**2)
    return MeasuredRun(prompts, tokens, _acceptance(newest), begun_share(samples, sharing.update, fmean(once)) if once else 0.0)


def prompts_from(known: Mapping[str, Any]) -> Prompts:
    """Returns the prompts that ``jobs.prediction`` journals."""
    return Prompts(known["mean"], known["square"], known["known"], tuple(Common(*each) for each in known["common"]))


def _acceptance(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the probability a that is the same at every position and gives the tokens that a step with drafts drew: 1 + a + ... + a^k for k proposed ones
    (Leviathan et al., 2023, equation 1), where k is their mean and the last power counts in proportion."""
    drawn = [(row["perf/spec_accept_length"] - 1, row["perf/spec_accept_rate"]) for row in rows if "perf/spec_accept_length" in row]
    if not drawn:
        return None
    accepted, rate = (fmean(each) for each in zip(*drawn, strict=True))
    if not rate:
        return 0.0
    proposed, low, high = accepted / rate, 0.0, 1.0
    whole = int(proposed)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tokens = sum(middle**place for place in range(1, whole + 1)) + (proposed - whole) * middle ** (whole + 1)
        low, high = (middle, high) if tokens < accepted else (low, middle)
    return high
