"""``tandem top``: the essentials of a run in a terminal, as text and nothing else."""

import io
import time
from pathlib import Path

import pytest
from recorded_runs import HOSTILE, make_run, row
from rich.console import Console

from tandem.cli.main import main
from tandem.dashboard.top import chosen_run, picture, sparkline
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import RunLock


def text_of(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(picture(chosen_run(folder), 160))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_run_is_drawn_with_what_its_sidecars_do_now(tmp_path: Path) -> None:
    make_run(tmp_path / "old", [row(step) for step in range(3)], finished=True)
    folder = make_run(tmp_path / "new", [row(step) for step in range(100)])
    with RunLock(folder), Journal(folder / "journal.sqlite") as journal, journal.transition(100, "trainer", "train"):
        time.sleep(0.01)
        said = text_of(tmp_path)
    assert "new  live  100 steps" in said and "trainer: train, step 100, for " in said and "rollout: rollout, step 3" in said
    assert "exactly 0" in said and "recovery step 2 rank 1 was killed" in said and "Accuracy" in said
    assert "live" not in text_of(folder) and "not finished" in text_of(folder)


def test_no_text_of_a_run_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [row(step) for step in range(3)], text=HOSTILE.replace("\ud83d", "") + "[red]\x07\x1b]0;title\x07")
    said = text_of(tmp_path)
    assert "[red]" in said and "<img src=x" in said and "\x1b" not in said and "\x07" not in said and "\u202e" not in said


def test_a_curve_of_one_line_has_the_shape_of_its_values() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, None, 1.0]) == "▅ ▅" and sparkline([]) == "" and sparkline([None]) == " "


def test_the_command_prints_once_where_there_is_no_terminal_and_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", [row(0)])
    assert main(["top", str(folder)]) == 0 and "1 steps" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for name, says in (("none", "is not a folder"), ("empty", "there are no runs in")):
        assert main(["top", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
