"""The committed table of equality is whole, and made by a script that runs and says where a row is outside."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / "equality.py"), "--out", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_committed_table_has_every_row_within_and_bit_for_bit_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rows = importlib.import_module("equality_rows").ROWS
    text = sorted((ROOT / "benchmarks" / "results").glob("equality-*.md"))[-1].read_text()
    float64, float32 = (part.splitlines() for part in text.split("\n## ")[1:])
    for row in rows:
        (line,), (last,) = ([line for line in lines if line.startswith(f"| {row.name} |")] for lines in (float64, float32))
        assert line.endswith("| within |") and last.endswith("| within |"), row.name
        assert not row.is_exact or last.endswith("| **yes** | within |"), row.name


@pytest.mark.full
def test_rows_of_the_table_are_made_anew(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "data 2, zero 2", "pipeline 2, gpipe", "tensor 2, deterministic", "GRPO, data 2, zero 1")
    assert done.returncode == 0, done.stderr
    text = next(tmp_path.glob("equality-*.md")).read_text()
    assert len(re.findall(r"^\| (GRPO, data|data|pipeline|tensor) 2.* within \|$", text, re.MULTILINE)) == 8
    assert "| pipeline 2, gpipe | **bits** | **bits** | **bits** |" in text
    assert re.findall(r"^\| (.*?) \|.*\| \*\*yes\*\* \| within \|$", text, re.MULTILINE) == ["data 2, zero 2", "pipeline 2, gpipe", "GRPO, data 2, zero 1"]


@pytest.mark.full
def test_row_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "tensor 3")
    assert done.returncode == 2 and "no such row" in done.stderr and not list(tmp_path.iterdir())
