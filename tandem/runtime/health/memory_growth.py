"""Finds processes whose memory grows without end, from their resident bytes at regular looks. Imports no torch."""

import itertools
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW, FEWEST = 60, 20
"""Looks of which the slope is taken, and from which on there is one."""
LEAST_BYTES = 64 * 2**20
"""A process has grown by at least so much in the window."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Of a process: its ``rss_bytes`` now, by how many ``bytes_per_s`` they grow, and whether that ``is_leak``: faster than the limit, and as fast in each half
    of the window, so that it is neither a start nor one large batch."""

    rss_bytes: int
    bytes_per_s: float = 0.0
    is_leak: bool = False


@dataclass
class MemoryGrowth:
    """``limit_bytes_per_s``: above which growth is a leak."""

    limit_bytes_per_s: float
    _looks: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def look(self, now_s: float, rss_bytes: Mapping[str, int]) -> dict[str, Growth]:
        """Takes the resident bytes of each process by its name, which has its id, and returns what follows. One that has ended is forgotten."""
        for name in self._looks.keys() - rss_bytes.keys():
            del self._looks[name]
        found = {}
        for name, size in rss_bytes.items():
            looks = self._looks.setdefault(name, deque(maxlen=WINDOW))
            looks.append((now_s, size))
            found[name] = self._growth(list(looks))
        return found

    def _growth(self, looks: list[tuple[float, int]]) -> Growth:
        size = looks[-1][1]
        if len(looks) < FEWEST:
            return Growth(size)
        half = len(looks) // 2
        whole, first, second = slope(looks), slope(looks[:half]), slope(looks[half:])
        grown = whole * (looks[-1][0] - looks[0][0])
        is_leak = whole > self.limit_bytes_per_s and min(first, second) > self.limit_bytes_per_s / 2 and grown >= LEAST_BYTES
        return Growth(size, whole, is_leak)


def slope(points: list[tuple[float, int]]) -> float:
    """Returns the slope of ``points`` by Theil and Sen: the median of those between each two, which single jumps do not move."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0
