"""The script of the committed equality table runs, and reports rows outside their bounds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / "equality.py"), "--out", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_rows_of_the_table_are_made_anew(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "data 2, zero 2", "pipeline 2, gpipe", "tensor 2, deterministic")
    assert done.returncode == 0, done.stderr
    text = next(tmp_path.glob("equality-*.md")).read_text()
    assert len(re.findall(r"^\| (data|pipeline|tensor) 2.* within \|$", text, re.MULTILINE)) == 6
    assert "| pipeline 2, gpipe | **bits** | **bits** | **bits** |" in text


@pytest.mark.full
def test_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "tensor 3")
    assert done.returncode == 2 and "no such row" in done.stderr and not list(tmp_path.iterdir())
