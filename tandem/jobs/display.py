"""Live progress of a run: a panel in a terminal, otherwise plain lines."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tandem.runtime.callback import Callback

WAIT_LINE_S = 10.0
"""Shortest time between two lines on the same wait."""


def duration(seconds: float) -> str:
    """Returns ``seconds`` as 41 s, 3 min 05 s or 2 h 10 min."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def shown(value: float | None, form: str) -> str:
    """Returns ``value`` in the format ``form``, a dash where there is none yet."""
    return "-" if value is None else format(value, form)


class _State:
    """The state of the run that both displays show. ``done``: optimizer steps taken; ``step``: the newest one."""

    def __init__(self) -> None:
        self.run_directory = ""
        self.max_steps = 0
        self.target: float | None = None
        self.phase, self.step, self.done = "starting", 0, 0
        self.score_name = ""
        self.score: float | None = None
        self.tokens_per_s: float | None = None
        self.accuracy: float | None = None
        self.first_row_at: float | None = None
        self.rows = 0
        self.waiting = ""
        self.began = time.monotonic()

    def time_left(self) -> str:
        """Returns an estimate from the steps so far for all ``max_steps``; a target may end the run earlier."""
        if self.first_row_at is None or self.rows < 2:
            return "-"
        per_step = (time.monotonic() - self.first_row_at) / (self.rows - 1)
        return ("at most " if self.target is not None else "") + duration(per_step * max(self.max_steps - self.done, 0))

    def take_row(self, row: Mapping[str, float | int | str]) -> None:
        self.step = int(row["step"])
        self.done = self.step + 1
        self.score_name, key = ("loss", "train/loss") if "train/loss" in row else ("reward", "reward/mean")
        self.score, self.tokens_per_s = (None if key not in row else float(row[key]) for key in (key, "perf/tokens_per_s"))
        self.rows += 1
        self.first_row_at = self.first_row_at or time.monotonic()

    def resumed(self, step: int, accuracy: float | None) -> None:
        # The time until the first step after it is not that of a step.
        self.done, self.accuracy, self.rows, self.first_row_at = step, accuracy, 0, None


class PlainDisplay(Callback):
    """Prints one line per event, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.state = _State()
        self.last_progress = 0.0
        self._waits_s, self._next_wait_s = 0.0, 0.0

    def _line(self, text: str) -> None:
        print(f"[{duration(time.monotonic() - self.state.began)}] {text}", file=self.stream, flush=True)

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        self.state.max_steps, self.state.target = max_steps, target
        until = f"at most {max_steps} steps, until held-out accuracy {target:.2f}" if target is not None else f"{max_steps} steps"
        self._line(f"run {run_directory}: {until}")

    def resumed(self, step: int, accuracy: float | None) -> None:
        self.state.resumed(step, accuracy)
        self._line(f"continuing after step {step}" + ("" if accuracy is None else f", held-out accuracy {accuracy:.3f}"))

    def phase(self, name: str, step: int) -> None:
        if name != self.state.phase and name in ("create_model", "sft", "final_evaluation"):
            self._line(name.replace("_", " "))
        self.state.phase = name

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        if total > 1 and time.monotonic() - self.last_progress > 5:
            self.last_progress = time.monotonic()
            self._line(f"{name.replace('_', ' ')} {done:.0f}/{total:.0f} {text}".rstrip())

    def row(self, row: Mapping[str, float | int | str]) -> None:
        self.state.take_row(row)
        state = self.state
        self._line(
            f"step {state.step}: {state.score_name} {shown(state.score, '.3f')}, {shown(state.tokens_per_s, '.0f')} tokens/s, "
            f"step time {float(row.get('timing_s/step', 0.0)):.2f} s, time left {state.time_left()}"
        )

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        self.state.accuracy = accuracy
        self._line(f"step {step}: {kind} accuracy {accuracy:.3f} on {count} held-out prompts")

    def message(self, text: str) -> None:
        self._line(text)

    def waiting(self, text: str) -> None:
        now = time.monotonic()
        if not self.state.waiting:
            self._waits_s = self._next_wait_s = now
        if text and now >= self._next_wait_s:
            self._line(text)
            # A wait twice as long is worth another line.
            self._next_wait_s = now + max(WAIT_LINE_S, now - self._waits_s)
        elif not text and self.state.waiting:
            self._line("going on")
        self.state.waiting = text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class TerminalDisplay(Callback):
    """A panel that is redrawn four times a second; messages and evaluations scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.state = _State()
        self.bars = Progress(
            TextColumn("{task.description:<16}"), BarColumn(bar_width=36), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
        )
        self.steps = self.bars.add_task("optimizer steps", total=None, note="")
        self.inner = self.bars.add_task("starting", total=None, note="")
        self.live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True, redirect_stdout=sys.stdout.isatty()
        )

    def _render(self) -> Panel:
        state, facts = self.state, Table.grid(padding=(0, 2))
        phase: list[str | Text] = ["phase", Text(state.phase.replace("_", " "), style="bold")]
        if state.target is not None:
            phase += ["accuracy", f"{shown(state.accuracy, '.3f')} of {state.target:.2f}"]
        facts.add_row(*phase)
        if state.score_name:
            facts.add_row(state.score_name, shown(state.score, ".3f"), "tokens/s", shown(state.tokens_per_s, ".0f"))
        facts.add_row("elapsed", duration(time.monotonic() - state.began), "time left", state.time_left())
        late = [Text(f"late: {state.waiting}", style="yellow")] if state.waiting else []
        return Panel(Group(facts, self.bars, *late), title=Text(f"tandem train  {state.run_directory}"), border_style="cyan")

    def started(self, run_directory: str, max_steps: int, target: float | None) -> None:
        self.state.run_directory, self.state.max_steps, self.state.target = run_directory, max_steps, target
        self.bars.update(self.steps, total=max_steps)

    def resumed(self, step: int, accuracy: float | None) -> None:
        self.state.resumed(step, accuracy)
        self.bars.update(self.steps, completed=step)
        self.console.print(f"continuing after step {step}", markup=False)

    def phase(self, name: str, step: int) -> None:
        self.state.phase = name
        # Without a total the bar pulses, until the phase reports its progress.
        self.bars.remove_task(self.inner)
        self.inner = self.bars.add_task(name.replace("_", " "), total=None, note="")

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        self.bars.update(self.inner, description=name.replace("_", " "), completed=done, total=total, note=text)

    def row(self, row: Mapping[str, float | int | str]) -> None:
        self.state.take_row(row)
        self.bars.update(self.steps, completed=self.state.done)

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        self.state.accuracy = accuracy
        self.console.print(f"step {step}: {kind} accuracy [bold]{accuracy:.3f}[/bold] on {count} held-out prompts")

    def message(self, text: str) -> None:
        self.console.print(text, markup=False)

    def waiting(self, text: str) -> None:
        self.state.waiting = text

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()


def display() -> PlainDisplay | TerminalDisplay:
    """Returns the display for standard output."""
    console = Console()
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay()


def python_display() -> PlainDisplay | TerminalDisplay:
    """Returns the display for a program: in a notebook, on a terminal, or on standard error, so that standard output stays the program's own."""
    from tandem.jobs.notebook_display import NotebookDisplay, in_notebook

    if in_notebook():
        return NotebookDisplay()
    console = Console(stderr=True)
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay(sys.stderr)
