"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete, wherever the pieces break.

    The match that ends first wins, and of those the longest: the result does not depend on how the text is cut.
    ``stopped`` is the stop string that was found, ``None`` before.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty; it would match everywhere")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._passed = 0
        self.stopped: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """What can be shown now: text that cannot be part of a stop string. Empty once stopped.

        A stop string that ends in ``text`` does not count without ``may_stop``; one that only begins there does."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        if not may_stop:
            self._passed = len(held)
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._find(held, stop)) >= 0]
        if matches:
            end, start, self.stopped = min(matches)
            self._held = ""
            return held[: end if self._include_stop else start]
        keep = max(overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        self._passed = max(0, self._passed - (len(held) - keep))
        return held[: len(held) - keep]

    def _find(self, text: str, stop: str) -> int:
        """Returns the index of the first ``stop`` in ``text`` that ends after the text already passed; -1 if there is none."""
        return text.find(stop, max(0, self._passed - len(stop) + 1))

    def finish(self) -> str:
        """Returns the held-back text, which is not a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of ``text`` that is a beginning of ``stop``, and shorter than it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
