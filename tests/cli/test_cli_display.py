"""The display of a run: plain lines in a log, a panel in a terminal."""

import io
import os
import pty
import subprocess
from pathlib import Path

from helpers_cli import COMMAND, ROOT
from rich.console import Console

from tandem.cli.display import PlainDisplay, TerminalDisplay, display, duration
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


def test_standard_output_that_is_no_terminal_gets_plain_lines(capsys) -> None:
    assert isinstance(display(), PlainDisplay)


def test_durations_read_as_a_person_says_them() -> None:
    seconds = (0.2, 59.4, 59.6, 185, 3600, 7800)
    assert [duration(s) for s in seconds] == ["0 s", "59 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "2 h 10 min"]


def test_in_a_terminal_a_run_draws_the_panel(recipe: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [str(COMMAND), "train", str(recipe), "--inline"], stdout=theirs, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "110"},
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # The other side of the terminal is closed.
                break
            if not part:
                break
            seen += part
        os.close(ours)
    text = seen.decode("utf-8")
    assert process.returncode == 0, text
    assert "╭" in text and "optimizer steps" in text and "\x1b[" in text
    assert "try the model:" in text
