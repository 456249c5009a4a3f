"""Reads event files back with TensorBoard's own reader."""

from pathlib import Path
from typing import Any

import pytest

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed, so its event files are not tested"
)


def scalars(folder: Path) -> dict[int, dict[str, float]]:
    """Returns the scalars of each step. A point that is there twice fails."""
    from tensorboard.util.tensor_util import make_ndarray

    reader = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in reader.Tags()["tensors"]:
        if reader.SummaryMetadata(tag).plugin_data.plugin_name != "scalars":
            continue
        for event in reader.Tensors(tag):
            assert tag not in found.setdefault(event.step, {}), f"{tag} of step {event.step} is there twice"
            found[event.step][tag] = make_ndarray(event.tensor_proto).item()
    return found


def table(folder: Path, tag: str) -> dict[int, list[list[str]]]:
    """Returns the table of text ``tag`` at each step."""
    from tensorboard.util.tensor_util import make_ndarray

    reader = event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {event.step: [[cell.decode() for cell in row] for row in make_ndarray(event.tensor_proto)] for event in reader.Tensors(tag)}


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Returns what of a row of ``metrics.jsonl`` are points."""
    return {name: float(value) for name, value in row.items() if name != "step" and isinstance(value, int | float)}
