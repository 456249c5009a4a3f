"""Reads back what trackers of services have of a run, independently of the trackers. A point that is there twice fails."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[int, dict[str, Any]]


def wandb_records(directory: Path) -> Iterator[Any]:
    """Yields the records of the one offline run of ``directory``: protobufs in a log of LevelDB's format, whose header has 7 bytes here."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        # A checksum (4 bytes), the length (2) and the type: whole 1, first 2, middle 3, last 4.
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0 or at + 7 + length > len(data):
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def wandb_points(directory: Path) -> Points:
    found: Points = {}
    for record in wandb_records(directory):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = int(record.history.step.num)
            assert step not in found, f"step {step} is there twice"
            # Samples are a table, whose items begin with "samples.".
            found[step] = {name: number for name, value in row.items() if (number := _number(value)) is not None and not name.startswith(("_", "samples."))}
    return found


def mlflow_runs(database: Path) -> list[Any]:
    """Returns the runs that are not deleted."""
    with sqlite3.connect(database) as connection:
        return [row[0] for row in connection.execute("SELECT run_uuid FROM runs WHERE lifecycle_stage = 'active'")]


def mlflow_points(database: Path) -> Points:
    """Reads the rows of MLflow's table: infinite values are the largest floats, as MLflow writes them."""
    (run,) = mlflow_runs(database)
    found: Points = {}
    with sqlite3.connect(database) as connection:
        for key, value, step in connection.execute("SELECT key, value, step FROM metrics WHERE run_uuid = ?", (run,)):
            assert key not in found.setdefault(step, {}), f"{key} of step {step} is there twice"
            found[step][key] = float("inf") if value == 1.7976931348623157e308 else value
    return found


def trackio_points(database: Path) -> Points:
    found: Points = {}
    with sqlite3.connect(database) as connection:
        for step, text in connection.execute("SELECT step, metrics FROM metrics"):
            assert step not in found, f"step {step} is there twice"
            found[step] = {name: number for name, value in json.loads(text).items() if (number := _number(value)) is not None}
    return found


def _number(value: Any) -> float | None:
    """Returns a value of JSON that has no infinities as a number, if it is one."""
    return float(value) if isinstance(value, int | float) or value in ("Infinity", "-Infinity", "NaN") else None


def wandb_written_points(directory: Path) -> Points:
    """Returns the points after W&B's service process, which writes the file, has ended."""
    import wandb

    wandb.teardown()
    return wandb_points(directory)
