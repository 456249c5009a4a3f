"""100 honest streams beside hostile clients: every request is answered and memory goes back. ``benchmarks/hostile_clients.py`` measures latencies."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_honest_clients_are_answered_beside_hostile_ones_and_memory_goes_back(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "hostile_clients.py"), "--seconds", "15", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| requests without an answer \| 0 \| 0 \|", done.stdout, re.MULTILINE), done.stdout
    kept = {name: float(ratio) for name, ratio in re.findall(r"^\| (server|engine|both) \| .* ([0-9.]+) \|$", done.stdout, re.MULTILINE)}
    assert set(kept) == {"server", "engine", "both"} and kept["both"] <= 1.1, done.stdout
    assert not re.search(r"\b5\d\d \(", done.stdout.replace("503", "")), done.stdout
