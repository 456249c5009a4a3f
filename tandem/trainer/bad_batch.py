"""Dumps the batch of a step whose update was skipped, so that the step can be replayed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.types import TrainSequence


def dump_batch(path: Path, step: int, sequences: Sequence[TrainSequence], metrics: Mapping[str, float]) -> None:
    """Writes ``sequences`` of optimizer step ``step`` and the step's ``metrics`` as JSON (``NaN`` and ``Infinity`` in Python's
    spelling)."""
    path.parent.mkdir(exist_ok=True)
    rows = [{"id": s.id, "token_ids": s.token_ids, "prompt_length": s.prompt_length, "loss_mask": s.loss_mask} for s in sequences]
    path.write_text(json.dumps({"step": step, "metrics": dict(metrics), "sequences": rows}) + "\n", encoding="utf-8")


def read_batch(path: Path) -> list[TrainSequence]:
    """Returns the sequences written by ``dump_batch``, as ``rl.algorithms.update.pack`` and ``trainer.step.train_step`` take them."""
    rows = json.loads(path.read_text(encoding="utf-8"))["sequences"]
    return [TrainSequence(r["id"], tuple(r["token_ids"]), r["prompt_length"], tuple(r["loss_mask"])) for r in rows]


def read_metrics(path: Path) -> dict[str, float]:
    """Returns the dumped step's metrics by name."""
    metrics: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return metrics
