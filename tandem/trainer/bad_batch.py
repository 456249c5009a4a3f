"""Dumps the batch of a step whose update was skipped, so that the step can be replayed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.types import TrainSequence


def dump_batch(path: Path, step: int, sequences: Sequence[TrainSequence], metrics: Mapping[str, float]) -> None:
    """Writes ``sequences`` of optimizer step ``step`` and the step's ``metrics`` as JSON (``NaN`` and ``Infinity`` in Python's
    spelling)."""
    path.parent.mkdir(exist_ok=True)
    names = ("id", "token_ids", "prompt_length", "loss_mask", "reference_logprobs", "margin")
    rows = [{name: getattr(s, name) for name in names} for s in sequences]
    path.write_text(json.dumps({"step": step, "metrics": dict(metrics), "sequences": rows}) + "\n", encoding="utf-8")


def read_batch(path: Path) -> list[TrainSequence]:
    """Returns the sequences written by ``dump_batch``, as ``rl.algorithms.update.pack`` and ``trainer.step.train_step`` take them."""
    rows = json.loads(path.read_text(encoding="utf-8"))["sequences"]
    return [
        TrainSequence(
            row["id"], tuple(row["token_ids"]), row["prompt_length"], tuple(row["loss_mask"]),
            reference_logprobs=None if row["reference_logprobs"] is None else tuple(row["reference_logprobs"]),
            margin=row["margin"],
        )
        for row in rows
    ]  # fmt: skip


def read_metrics(path: Path) -> dict[str, float]:
    """Returns the dumped step's metrics by name."""
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return metrics
