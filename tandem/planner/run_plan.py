"""The time and the cost of a whole run with a layout: its steps, checkpoints and failures. Imports no torch."""

import math
from dataclasses import asdict
from typing import Any

from tandem.estimate.training.predict_run import HOUR_S, RunConditions, RunTime, predict_run
from tandem.planner.score import Score
from tandem.types.errors import UserError

MOST_TOKENS = 1e18
DAY_S = 24 * HOUR_S


def plan_run(score: Score, text: str) -> RunTime:
    """Returns the run on the tokens of ``text``, such as ``15e12``. Raises ``UserError`` for a number that no run has."""
    try:
        tokens = float(text)
    except ValueError:
        tokens = math.nan
    if not score.tokens <= tokens <= MOST_TOKENS:
        raise UserError(f"--train-tokens is '{text}'; it must be a number of tokens, from the {score.tokens:,} of a step to 1e18, such as 15e12")
    return predict_run(score.shapes, score.layout, score.hardware, score.step_seconds, tokens)


def run_text(run: RunTime) -> str:
    """Returns lines on the run for a person, with what was assumed."""
    known = RunConditions()
    cost = f", ${run.cost:,.0f}" if run.cost else ""
    return (
        f"run of {run.steps:,} steps: {run.seconds / DAY_S:,.3g} days, {run.gpu_hours:,.0f} GPU-hours{cost}; {100 * run.share:.1f} % of the time trains\n"
        f"  {run.failures:,.3g} failures, one in {run.between_failures_s / HOUR_S:,.3g} hours; a checkpoint of {run.checkpoint_bytes / 2**30:,.0f} GiB each "
        f"{run.interval_s:,.3g} s (Daly, 2006) stops training for {run.stall_s:.2g} s\n"
        f"  assumed: failures as in {known.failures.source}, {known.detect_s:.0f} s until one is known, {known.start_s:.0f} s until processes load, storage of "
        f"{known.storage_bandwidth / 1e9:.0f} GB/s for all nodes, tokens at {known.data_bandwidth / 1e6:.0f} MB/s a node"
    )


def run_json(run: RunTime) -> dict[str, Any]:
    """Returns the run as an object, in seconds, bytes and US dollars."""
    return asdict(run)
