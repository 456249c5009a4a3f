"""The states of a pod's sidecars over time, as bars of a timeline: any part of 100,000 phases, without bars that are too narrow to be seen."""

from array import array
from bisect import bisect_left, bisect_right
from typing import Any

from tandem.runtime.records.journal import Journal

RECENT = 20_000
"""Phases that are read of a long run before older ones are asked for."""
MOST_BARS = 1500
"""Bars of one lane: a screen is at most about as many pixels wide."""
_STILL_OPEN = 500
"""A phase without an end that has so many after it was cut off, and will not get one."""
SEVERAL = "several"
"""The state of a bar that represents phases too short to be drawn."""


class Phases:
    """The phases of a run in the order of their starts. Times are seconds since the first."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self._incarnation = -1
        self._forget()

    def _forget(self) -> None:
        self._ids: array[int] = array("q")
        self._steps: array[int] = array("q")
        self._start: array[float] = array("d")
        self._end: array[float] = array("d")
        self._names: list[tuple[str, str]] = []
        self._longest = 0.0
        self._first_step, self._before = 0, 0
        self.is_whole = True

    def __len__(self) -> int:
        return len(self._ids)

    def follow(self, journal: Journal, *, whole: bool = False) -> None:
        """Reads the phases that were added or have ended; all again after a resume, which may have removed some. Of a long run the newest are read, and those
        before them when ``whole`` is asked for."""
        if journal.incarnation != self._incarnation or (whole and not self.is_whole):
            self._forget()
            self._incarnation = journal.incarnation
        if not self._ids:
            self._before = 0 if whole else max(0, journal.last_transition() - RECENT)
            self.is_whole = self._before == 0
            self._first_step, self.began_s = journal.first_transition() or (0, 0.0)
        first = max(0, len(self) - _STILL_OPEN)
        known = next((place for place in range(first, len(self)) if self._end[place] != self._end[place]), len(self))
        for values in (self._ids, self._steps, self._start, self._end):
            del values[known:]  # type: ignore[attr-defined]
        del self._names[known:]
        known_names: dict[tuple[str, str], tuple[str, str]] = {}
        for id, step, sidecar, state, started_s, ended_s in journal.spans(self._ids[-1] if self._ids else self._before):
            self._ids.append(id)
            self._steps.append(step)
            self._start.append(started_s - self.began_s)
            self._end.append(float("nan") if ended_s is None else ended_s - self.began_s)
            if ended_s is not None:
                self._longest = max(self._longest, ended_s - started_s)
            self._names.append(known_names.setdefault((sidecar, state), (sidecar, state)))

    @property
    def end_s(self) -> float:
        """The newest time that is known."""
        newest = range(max(0, len(self) - 100), len(self))
        return max((max(self._start[place], self._end[place] if self._end[place] == self._end[place] else 0.0) for place in newest), default=0.0)

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        return (self._first_step, self._steps[-1]) if self._ids else (0, 0)

    def covers(self, low: float | None, step: int | None) -> bool:
        """Whether the phases that were read begin before the time ``low`` and before ``step``."""
        if self.is_whole or not self._ids:
            return True
        return (low is None or low - self._longest > self._start[0]) and (step is None or step > self._steps[0])

    def of_steps(self, first: int, last: int) -> tuple[float, float]:
        """Returns the time from the start of step ``first`` to the end of step ``last``."""
        start, stop = bisect_left(self._steps, first), bisect_right(self._steps, last)
        if start >= stop:
            return 0.0, self.end_s
        ends = [end if end == end else self._start[place] for place, end in enumerate(self._end[start:stop], start)]
        return self._start[start], max(ends)

    def newest_from(self, count: int) -> float:
        """Returns when the first of the newest ``count`` phases began."""
        return self._start[max(0, len(self) - count)] if len(self) else 0.0

    def newest(self) -> list[tuple[str, str, int, float, float | None]]:
        """Returns the newest phase of each sidecar: sidecar, state, step, start and end (``None`` while it lasts)."""
        found: dict[str, tuple[str, str, int, float, float | None]] = {}
        for place in range(len(self) - 1, max(-1, len(self) - 1 - _STILL_OPEN), -1):
            (sidecar, state), end = self._names[place], self._end[place]
            found.setdefault(sidecar, (sidecar, state, self._steps[place], self._start[place], None if end != end else end))
        return [found[sidecar] for sidecar in sorted(found)]

    def window(self, low: float, high: float, now_s: float | None, *, most_bars: int = MOST_BARS) -> dict[str, Any]:
        """Returns the bars from ``low`` to ``high``. ``now_s``: the end of a phase that still lasts, ``None`` where the run does not. ``most_bars``: of a lane;
        phases that are narrower than such a bar are one with their neighbours."""
        start = bisect_left(self._start, low - self._longest)
        stop = bisect_right(self._start, high)
        least = (high - low) / most_bars
        lanes: dict[str, list[list[Any]]] = {}
        for place in range(start, stop):
            sidecar, state = self._names[place]
            begin, end, is_cut = self._start[place], self._end[place], False
            if end != end:
                is_cut = now_s is None or len(self) - place > _STILL_OPEN
                end = begin if is_cut or now_s is None else max(begin, now_s)
            if end < low:
                continue
            lane = lanes.setdefault(sidecar, [])
            if end - begin >= least or is_cut:
                lane.append([begin, end, state, self._steps[place], self._ids[place], int(is_cut)])
            elif lane and lane[-1][2] == SEVERAL and begin - lane[-1][1] <= least and end - lane[-1][0] <= 4 * least:
                lane[-1][1] = max(lane[-1][1], end)
                lane[-1][4] += 1
            else:
                lane.append([begin, end, SEVERAL, self._steps[place], 1, 0])
        ends = sorted(set(lanes), key=lambda name: (name != "trainer", name))
        return {
            "lanes": [{"name": name, "bars": [[round(bar[0], 6), round(bar[1], 6), *bar[2:]] for bar in lanes[name]]} for name in ends],
            "from": low, "to": high, "end": max(self.end_s, now_s or 0.0), "began_s": self.began_s, "steps": list(self.steps), "count": len(self),
        }  # fmt: skip
