"""Live progress of a run in a notebook: one output that updates itself."""

import html
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tandem.jobs.display import PlainDisplay, duration

REFRESH_S = 0.25
LINES = 12
"""The newest lines of the run that are shown."""


def in_notebook() -> bool:
    """Returns whether this program runs in the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay(PlainDisplay):
    """Shows bars for the steps and for the present phase, and the newest lines of the run, in one output of the cell."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._done = 0
        self._inner: tuple[float, float, str] | None = None
        self._handle: Any = None
        self._drawn_at = 0.0

    def _line(self, text: str) -> None:
        self._lines.append(f"[{duration(time.monotonic() - self.state.began)}] {text}")
        self._draw()

    def phase(self, name: str, step: int) -> None:
        super().phase(name, step)
        self._inner = None
        self._draw(at_once=False)

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        self._inner = (done, total, f"{name.replace('_', ' ')} {done:.0f}/{total:.0f} {text}")
        self._draw(at_once=False)

    def row(self, row: Mapping[str, float | int | str]) -> None:
        self._done, self._inner = int(row["step"]) + 1, None
        super().row(row)

    def _draw(self, at_once: bool = True) -> None:
        if self._handle is None or not (at_once or time.monotonic() - self._drawn_at > REFRESH_S):
            return
        self._drawn_at = time.monotonic()
        self._handle.update(self)

    def _repr_html_(self) -> str:
        state = self.state
        bars = [_bar(self._done, state.max_steps, f"{self._done}/{state.max_steps} steps, time left {state.time_left()}")]
        bars += [_bar(*self._inner)] if self._inner is not None else [f"<div>{html.escape(state.phase.replace('_', ' '))}</div>"]
        lines = html.escape("\n".join(self._lines))
        return f"<div><b>tandem train</b> {html.escape(state.run_directory)}{''.join(bars)}<pre>{lines}</pre></div>"

    def __repr__(self) -> str:
        return "\n".join(self._lines)

    def __enter__(self) -> "NotebookDisplay":
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        self._handle = display(self, display_id=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.state.phase = "finished" if kind is None else "stopped"
        self._inner = None
        self._draw()


def _bar(done: float, total: float, text: str) -> str:
    return f'<div><progress value="{done:g}" max="{max(total, 1):g}"></progress> {html.escape(text)}</div>'
