"""``replays.jsonl`` of a run: what each replay of its steps found, one JSON object a line."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "replays.jsonl"
_TAIL_BYTES = 262_144


def add_replay(directory: Path, found: Mapping[str, Any]) -> str:
    """Adds a line to the file of the run in ``directory`` by one write, as several replays may end at once. Returns why it could not, empty where it could."""
    try:
        descriptor = os.open(directory / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(found).encode("ascii") + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_replays(directory: Path, most: int) -> Sequence[Mapping[str, Any]]:
    """Returns the newest ``most`` replays of the run in ``directory``, the newest first; a line that is no replay is left out."""
    try:
        with (directory / FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found: list[Mapping[str, Any]] = []
    for line in reversed(lines):
        try:
            value = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and type(value.get("step")) is int and isinstance(value.get("parts"), list) and len(found) < most:
            found.append(value)
    return found
