"""How long a supervisor waits before it starts lost processes again."""

FIRST_S = 0.5
MOST_S = 30.0


class Backoff:
    """The waits before restarts: none after the first loss at a step, then ``FIRST_S``, doubled with each further loss without progress, at most
    ``MOST_S``. Progress is a loss at a later step than all before."""

    def __init__(self) -> None:
        self._furthest = -1
        self._losses = 0

    def wait_s(self, step: int) -> float:
        """Counts a loss at ``step`` and returns the seconds to wait before the restart."""
        self._losses = 1 if step > self._furthest else self._losses + 1
        self._furthest = max(self._furthest, step)
        # The exponent is bounded because the number of restarts is not.
        return 0.0 if self._losses == 1 else min(MOST_S, FIRST_S * 2.0 ** min(self._losses - 2, 30))


def describe_wait(wait_s: float) -> str:
    """Returns ``in 4 s``, or ``now``."""
    return f"in {wait_s:g} s" if wait_s else "now"
