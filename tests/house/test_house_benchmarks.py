"""The scripts of ``benchmarks/``."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "parser" in path.read_text() and '__name__ == "__main__"' in path.read_text()]


@pytest.mark.full
def test_every_benchmark_shows_its_help_so_it_finds_what_it_imports() -> None:
    assert len(SCRIPTS) > 50
    for script in SCRIPTS:
        done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.startswith("usage: "), (script.name, done.stderr[-400:])
