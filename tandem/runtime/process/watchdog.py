"""The watchdog of a run's controller: shows what is late, takes the stacks of all parties of a wait that is overdue, and watches the controller itself."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tandem.runtime.process.processes import memory_of
from tandem.runtime.process.stacks import innermost, named_stacks
from tandem.runtime.process.waits import WAITS, Wait, Waits

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Time between two looks."""


class Watchdog:
    """A thread beside the loop of the controller of the run in ``directory``, whose processes answer with their stacks in ``stacks``.

    ``show``: is told, in this thread, what is waited for while it is late, and the empty text when it is not. ``memory_alarm_bytes``, ``lag_alarm_s``: the
    resident bytes of the controller and the lag of its loop above which an alarm is raised, once until they are below again."""

    def __init__(
        self, directory: Path, stacks: Path, show: Callable[[str], None], *, memory_alarm_bytes: float, lag_alarm_s: float, waits: Waits = WAITS
    ) -> None:
        self._directory, self._stacks, self._show, self._waits = directory, stacks, show, waits
        self._limits = {"controller/rss_bytes": memory_alarm_bytes, "controller/loop_lag_s": lag_alarm_s}
        self._lock = threading.Lock()
        self._most = dict.fromkeys(self._limits, 0.0)
        self._alarms: list[str] = []
        self._raised = set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._waits.on_expired = self.expired
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waits.on_expired, self._waits.stacks_elsewhere = lambda wait: "", dict
        self._ended.set()
        self._thread.join()

    def take_gauges(self) -> dict[str, float]:
        """Returns the largest resident size and loop lag of the controller since the last call, by the names of their metrics."""
        with self._lock:
            most, self._most = self._most, dict.fromkeys(self._limits, 0.0)
        return most

    def take_alarms(self) -> list[str]:
        """Returns the alarms since the last call, a line each."""
        with self._lock:
            alarms, self._alarms = self._alarms, []
        return alarms

    def expired(self, wait: Wait) -> str:
        """Logs who waits for whom since when, and writes the stacks of all processes of the run, those on other machines too, to a file. Returns a few words on
        where they are."""
        logger.warning("overdue: %s", wait.describe())
        for text, _ in wait.behind:
            logger.warning("behind it: %s", text)
        taken = {**named_stacks(self._stacks, self._directory, self._waits.owner), **self._waits.stacks_elsewhere()}
        path = self._directory / "logs" / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{wait.id}.txt"
        parts = [wait.describe(), *(text for text, _ in wait.behind)]
        for who, text in taken.items():
            parts.append(f"\n{who}\n{text}")
            logger.warning("%s: %s", who, innermost(text))
        path.write_text("\n".join(parts), encoding="utf-8")
        return f"the stacks of {len(taken)} processes are in '{path}'"

    def _watch(self) -> None:
        shown, before = "", time.monotonic()
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            self._measure(now - before - LOOK_S)
            before = now
            text = _of_all(self._waits.late())
            if text or shown:
                self._show(text)
            shown = text

    def _measure(self, lag_s: float) -> None:
        measured = {"controller/rss_bytes": float(memory_of(os.getpid()).rss_bytes), "controller/loop_lag_s": max(lag_s, 0.0)}
        for name, value in measured.items():
            with self._lock:
                self._most[name] = max(self._most[name], value)
            if value <= self._limits[name]:
                self._raised.discard(name)
            elif name not in self._raised:
                self._raised.add(name)
                alarm = _alarm(name, value, self._limits[name])
                logger.warning("%s", alarm)
                with self._lock:
                    self._alarms.append(alarm)


def _of_all(late: list[Wait]) -> str:
    """Returns the line of the process at the end of the chain of waits, empty if nothing is late."""
    behind = [text for wait in late for text, is_late in wait.behind if is_late]
    return behind[-1] if behind else late[-1].describe() if late else ""


def _alarm(name: str, value: float, limit: float) -> str:
    if name == "controller/rss_bytes":
        return f"the controller takes {value / 2**30:.2f} GiB of memory, more than watchdog.memory_alarm_gib ({limit / 2**30:g})"
    return f"the controller's loop stood still for {value:.1f} s, longer than watchdog.lag_alarm_s ({limit:g}): this machine is overloaded, or was suspended"
