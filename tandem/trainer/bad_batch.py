"""The batch of a step that was left out, kept so that the step can be run again."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.types import TrainSequence


def dump_batch(path: Path, step: int, sequences: Sequence[TrainSequence], metrics: Mapping[str, float]) -> None:
    """``sequences`` of optimizer step ``step`` and what the step measured, as JSON (``NaN`` and ``Infinity`` as Python reads them)."""
    path.parent.mkdir(exist_ok=True)
    rows = [{"id": s.id, "token_ids": s.token_ids, "prompt_length": s.prompt_length, "loss_mask": s.loss_mask} for s in sequences]
    path.write_text(json.dumps({"step": step, "metrics": dict(metrics), "sequences": rows}) + "\n", encoding="utf-8")


def read_batch(path: Path) -> list[TrainSequence]:
    """The sequences that ``dump_batch`` has kept, for ``rl.algorithms.update.pack`` and ``trainer.step.train_step``."""
    rows = json.loads(path.read_text(encoding="utf-8"))["sequences"]
    return [TrainSequence(r["id"], tuple(r["token_ids"]), r["prompt_length"], tuple(r["loss_mask"])) for r in rows]


def read_metrics(path: Path) -> dict[str, float]:
    """What the step measured, by name."""
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return found
