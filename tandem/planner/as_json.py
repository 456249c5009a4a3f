"""A scored layout as JSON. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tandem.estimate.training.rank_memory import memory_by_stage
from tandem.layout.parameters import parameter_count
from tandem.planner.plan import Plan
from tandem.planner.score import Score
from tandem.planner.warnings import warnings_of
from tandem.planner.what_if import WhatIf


def score_json(score: Score) -> dict[str, Any]:
    """Returns ``score`` as an object: seconds, bytes, and 10^12 operations a second."""
    return {
        "step_seconds": score.step_seconds,
        "model_tflops_per_gpu": score.model_tflops_per_gpu,
        "mfu_percent": score.mfu_percent,
        "tokens_per_s_per_gpu": score.tokens_per_s_per_gpu,
        "memory_bytes_per_gpu": {"total": score.memory.total, **asdict(score.memory)},
        "memory_bytes_by_stage": [{"total": stage.total, **asdict(stage)} for stage in memory_by_stage(score.shapes, score.layout)],
        "bubble_fraction": score.bubble_fraction,
        "fits": score.fits,
        "dollars_per_billion_tokens": score.dollars_per_billion_tokens or None,
        "seconds_by_kind": asdict(score.time),
        "gpu": score.hardware.name,
        "gpus": score.layout.gpus,
        "parameters": parameter_count(score.shapes),
        "layout": layout_json(score),
        "warnings": warnings_of(score),
    }


def layout_json(score: Score) -> dict[str, Any]:
    """Returns the layout by the names of the command's flags."""
    layout, parallel = score.layout, score.layout.parallel
    return {
        "tp": parallel.tensor, "pp": parallel.pipeline, "virtual_pp": parallel.virtual_stages, "dp": parallel.data, "cp": parallel.context,
        "ep": parallel.expert, "zero": parallel.zero,
        "micro_batch": layout.micro_batch, "micro_batches": layout.micro_batches, "global_batch": layout.global_batch,
        "seq": layout.sequence, "precision": layout.precision, "recompute": layout.recompute, "offload": layout.offload,
        "sequence_parallel": layout.shares_tokens,
    }  # fmt: skip


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan: the score of the answer, as ``score_json``, with what led to it."""
    return {
        **score_json(plan.chosen),
        "rule": {"reason": plan.advice.reason, **brief_json(plan.rule)},
        "verdict": plan.verdict,
        "considered": plan.sweep.considered,
        "pareto": [brief_json(each) for each in plan.sweep.pareto],
        "fastest": [brief_json(each) for each in plan.sweep.scored[:10]],
        "memory_rule": {
            "ratio": plan.memory.ratio, "strategy": plan.memory.strategy, "reason": plan.memory.reason,
            "fastest_that_fits": plan.memory.fastest and plan.memory.fastest.name,
            "strategies": [
                {
                    "name": each.name, "memory_bytes": each.memory_bytes, "saved": each.saved, "compute_overhead": each.compute_overhead,
                    "communication_bytes": each.communication_bytes, "offload_seconds": each.offload_seconds, "step_seconds": each.step_seconds,
                }
                for each in plan.memory.strategies
            ],
        },
        "axes": [asdict(each) for each in plan.axes],
    }  # fmt: skip


def brief_json(score: Score) -> dict[str, Any]:
    """Returns a layout with its figures alone."""
    return {
        "layout": layout_json(score), "step_seconds": score.step_seconds, "mfu_percent": score.mfu_percent, "memory_bytes": score.memory.total,
        "dollars_per_billion_tokens": score.dollars_per_billion_tokens or None, "fits": score.fits,
    }  # fmt: skip


def what_if_json(base: Score, compared: Sequence[WhatIf], front: Sequence[tuple[str, Score]]) -> dict[str, Any]:
    """Returns each change with its best layout and what it is over ``base``, and the front of all layouts of all changes."""
    return {
        "what_if": [{"changes": each.words, "considered": each.considered, **_beside(each.score, base)} for each in compared],
        "front": [{"changes": words, "gpus": each.layout.gpus, "gpu": each.hardware.name, **brief_json(each)} for words, each in front],
    }


def _beside(score: Score | None, base: Score) -> dict[str, Any]:
    if score is None:
        return {"fits": False}
    cost, before = score.dollars_per_billion_tokens, base.dollars_per_billion_tokens
    ratios = {"step_ratio": score.step_seconds / base.step_seconds, "cost_ratio": cost / before if cost and before else None}
    return {"gpus": score.layout.gpus, "gpu": score.hardware.name, **brief_json(score), **ratios}
