"""Runs on data as a user makes them, and what they wrote."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tandem.runtime.records.metrics import VOLATILE


def command(*arguments: str, status: int = 0, folder: Path | None = None) -> str:
    """What ``tandem ARGUMENTS`` in ``folder`` prints; it ends with ``status`` and without a traceback."""
    done = subprocess.run([sys.executable, "-m", "tandem.cli.main", *arguments], cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(run: Path, *, every_key: bool = False) -> list[dict[str, Any]]:
    """``metrics.jsonl``, but for ``every_key`` without what a clock or a memory meter wrote."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if every_key or not key.startswith(VOLATILE)} for row in found]
