"""The display of a run: plain lines in a log, a panel in a terminal."""

import fcntl
import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_cli import COMMAND, ROOT
from rich.console import Console

from tandem.jobs.display import PlainDisplay, TerminalDisplay, display, duration
from tandem.runtime.callback import Callback


def tell(callback: Callback) -> None:
    """Makes the callbacks of a short run."""
    callback.started("runs/größe [red]", 10, 0.9)
    callback.phase("sft", 0)
    callback.progress("sft", 3, 7, "loss 1.234")
    callback.phase("rollout", 4)
    callback.evaluated(4, 0.5, 64, "sampled")
    for step in (4, 5):
        callback.row({"step": step, "reward/mean": 0.625, "perf/tokens_per_s": 1234.4, "timing_s/step": 0.5})
    callback.message("step 5: 2 of 8 samples masked; [bold]not markup[/bold]")


def test_a_log_has_one_plain_line_an_event() -> None:
    stream = io.StringIO()
    with PlainDisplay(stream) as shown:
        tell(shown)
    lines = [line.split("] ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines[0] == "run runs/größe [red]: at most 10 steps, until held-out accuracy 0.90"
    assert "sft" in lines and "sft 3/7 loss 1.234" in lines
    assert "step 4: sampled accuracy 0.500 on 64 held-out prompts" in lines
    assert "step 4: reward 0.625, 1234 tokens/s, step time 0.50 s, time left -" in lines
    assert lines[-1] == "step 5: 2 of 8 samples masked; [bold]not markup[/bold]"
    assert "\x1b" not in stream.getvalue()


def test_the_panel_shows_phase_reward_accuracy_speed_and_time_left() -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    with TerminalDisplay(console) as shown:
        tell(shown)
        console.print(shown._render())
    text = console.export_text()
    facts = ("phase", "rollout", "0.625", "0.500 of 0.90", "1234", "time left", "at most", "6/10")
    for part in (*facts, "runs/größe [red]", "[bold]not markup[/bold]"):
        assert part in text, part


def test_what_a_program_prints_to_a_file_is_not_drawn_above_the_panel(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    with TerminalDisplay(Console(file=terminal, force_terminal=True)) as shown:
        shown.started("runs/one", 2, None)
        print("42")
    assert capsys.readouterr().out == "42\n" and "42" not in terminal.getvalue()


def panel_of(events: Callable[[Callback], None]) -> str:
    """Returns the panel after ``events``."""
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    with TerminalDisplay(console) as shown:
        events(shown)
        console.print(shown._render())
    return console.export_text()


def test_panel_shows_bars_and_figures_in_the_warm_up_and_no_value_before_there_is_one() -> None:
    def warm_up(callback: Callback) -> None:
        callback.started("runs/sort", 200, 0.9)
        callback.phase("sft", 0)
        callback.progress("sft", 90, 225, "loss 1.234, 30192 tokens/s")

    text = panel_of(warm_up)
    assert "90/225" in text and "loss 1.234, 30192 tokens/s" in text and "0/200" in text and "- of 0.90" in text
    assert "nan" not in text and "reward" not in text
    text = panel_of(lambda callback: callback.started("runs/sort", 200, None))
    assert "starting" in text and "nan" not in text and "accuracy" not in text
    text = panel_of(lambda callback: callback.row({"step": 0, "perf/tokens_per_s": 12.0}))
    assert "nan" not in text and "reward" in text


def test_displays_show_the_step_and_the_accuracy_of_the_checkpoint_after_a_resume() -> None:
    def resume(callback: Callback) -> None:
        callback.started("runs/sort", 200, 0.9)
        callback.resumed(120, 0.75)
        callback.phase("evaluate", 120)

    text = panel_of(resume)
    assert "120/200" in text and "0.750 of 0.90" in text
    stream = io.StringIO()
    with PlainDisplay(stream) as shown:
        resume(shown)
    assert stream.getvalue().splitlines()[-1].endswith("continuing after step 120, held-out accuracy 0.750")


def test_standard_output_that_is_no_terminal_gets_plain_lines(capsys) -> None:
    assert isinstance(display(), PlainDisplay)


def test_durations_read_as_a_person_says_them() -> None:
    seconds = (0.2, 59.4, 59.6, 185, 3600, 7800)
    assert [duration(s) for s in seconds] == ["0 s", "59 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "2 h 10 min"]


PROGRAM = "import sys, tandem; print('try the model:', tandem.train(sys.argv[1], inline=True).model)"


def in_terminal(*command: str, until: str = "", keys: bytes = b"") -> tuple[int, str]:
    """Runs ``command`` as the foreground job of a terminal of its own, where Ctrl-C is a key. Types ``keys`` once ``until`` was printed. Returns the
    exit status and the output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command], stdout=theirs, stderr=theirs, stdin=theirs, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "110"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Makes the terminal the controlling one.
    )  # fmt: skip
    os.close(theirs)
    seen, alarm = b"", threading.Timer(200, process.kill)
    alarm.start()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # The other side of the terminal is closed.
            break
        seen += part
        if keys and until.encode() in seen:
            os.write(ours, keys)
            keys = b""
    alarm.cancel()
    os.close(ours)
    return process.wait(60), seen.decode("utf-8")


@pytest.mark.parametrize(
    "command", [(str(COMMAND), "train", "--inline"), pytest.param((sys.executable, "-c", PROGRAM), marks=pytest.mark.full)], ids=["command", "program"]
)
def test_in_a_terminal_a_run_draws_the_panel(recipe: Path, command: tuple[str, ...]) -> None:
    status, text = in_terminal(*command, str(recipe))
    assert status == 0, text
    assert "╭" in text and "optimizer steps" in text and "\x1b[" in text and "tokens/s" in text
    assert "try the model:" in text and "nan" not in text


@pytest.mark.full
def test_ctrl_c_in_a_terminal_saves_the_step_of_a_pod_and_the_panel_of_its_resume_begins_there(recipe: Path) -> None:
    longer = ("--run.max_steps=100000", "--evaluation.every_steps=1", "--run.name=mine")
    status, text = in_terminal(str(COMMAND), "train", str(recipe), *longer, until="sampled accuracy", keys=b"\x03")
    assert status == 130, text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    (run,) = (recipe.parent / "runs").iterdir()
    saved = re.search(r"stopped after step (\d+), which is saved: '(?:\S*/)?tandem resume", plain.replace("\r\n", " "))
    assert saved is not None and "a second signal stops at once" in " ".join(plain.split()) and "nan" not in plain
    assert (run / "checkpoints" / f"step-{saved[1]}" / "COMMIT").is_file()
    status, text = in_terminal(str(COMMAND), "resume", str(run), f"--run.max_steps={int(saved[1]) + 2}")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert status == 0, plain
    assert f"continuing after step {saved[1]}" in plain and f"{saved[1]}/{int(saved[1]) + 2}" in plain and "nan" not in plain
