"""Finds the ranks and links that hold up a synchronous run, from where the time of each rank goes. Imports no torch.

A rank is late if its own work in a step takes longer than that of its peers, the ranks of the same pipeline stage, which have as much to do. A link is slow if
its round trip is longer than that of the others, or than it was, and the ranks wait in collectives for it. Medians over a window of steps count, and an
excess must stand out of its own scatter (the median absolute deviation), so that one slow step, or noise, names no rank.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.layout.mesh import Mesh, MeshShape
from tandem.runtime.health.step_times import RankTimes

FEWEST_LOOKS = 8
"""Looks of the window from which on there is a judgement."""
LEAST_EXCESS_S, LEAST_SHARE = 0.02, 0.1
"""A rank is late by at least so many seconds of a step, and so much of the time of a step."""
STANDARD_ERRORS = 5.0
_SIGMA_OF_MAD = 1.4826
_ERROR_OF_MEDIAN = 1.2533
LINK_FACTOR, LEAST_ROUND_TRIP_S, LEAST_WAIT_SHARE = 4.0, 0.002, 0.1
"""A slow link has so many times the usual round trip, so many seconds more, and all ranks wait for so much of a step."""
_FEWEST_LINKS = 3
"""Links of which the others' median is the usual one; of fewer each is compared with its own past."""


@dataclass(frozen=True, slots=True)
class Late:
    """``key``: of the rank or the link. ``is_link``. ``text``: one line that names it, with what was measured. ``detail``: the same as values."""

    key: str
    is_link: bool
    text: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """Of one rank, in seconds of a step."""

    own_s: Mapping[str, float]
    waited_s: Mapping[str, float]

    @property
    def own(self) -> float:
        return sum(self.own_s.values())

    @property
    def whole(self) -> float:
        return self.own + sum(self.waited_s.values())


@dataclass
class StragglerWatch:
    """Watches the ranks of ``shape``. ``factor``: see section ``health``; ``steps``: of the window. ``late``: what holds up the run now, by key."""

    shape: MeshShape
    factor: float
    steps: int
    late: dict[str, Late] = field(default_factory=dict)
    _before: dict[int, RankTimes] = field(default_factory=dict)
    _window: deque[dict[int, _Step]] = field(default_factory=deque)
    _links: deque[dict[str, float]] = field(default_factory=deque)
    _usual_links: dict[str, float] = field(default_factory=dict)

    def look(self, times: Sequence[RankTimes]) -> tuple[list[Late], list[Late]]:
        """Takes the times of all ranks. Returns what holds up the run from now on, and what does no longer."""
        now = {each.rank: each for each in times}
        if len(now) < self.shape.world or not self.factor:
            return [], []
        if any(now[rank].pid != before.pid for rank, before in self._before.items() if rank in now):
            # Started again: the sums began anew, on other nodes perhaps.
            self._before.clear()
            self._window.clear()
            self._links.clear()
            self._usual_links.clear()
        if self._before and any(now[rank].steps <= self._before[rank].steps for rank in now):
            return [], []
        if self._before:
            self._keep({rank: _since(each, self._before[rank]) for rank, each in now.items()}, _links_of(times))
        self._before = now
        if len(self._window) < FEWEST_LOOKS:
            return [], []
        found = {each.key: each for each in [*self._late_ranks(now), *self._late_links(now)]}
        begun, ended = [found[key] for key in found.keys() - self.late.keys()], [self.late[key] for key in self.late.keys() - found.keys()]
        self.late = found
        return sorted(begun, key=lambda each: each.key), sorted(ended, key=lambda each: each.key)

    def excesses(self) -> dict[int, float]:
        """Returns by how many seconds of a step each rank is later than its peers (negative: earlier), the median of the window."""
        return {rank: statistics.median(values) for rank in range(self.shape.world) if (values := self._excess(rank))}

    def _keep(self, steps: dict[int, _Step], links: dict[str, float]) -> None:
        self._window.append(steps)
        self._links.append(links)
        while len(self._window) > self.steps:
            self._window.popleft()
            self._links.popleft()

    # -- ranks -------------------------------------------------------------------------------------------------------------

    def _peers(self, rank: int) -> list[int]:
        stage = Mesh(self.shape, rank).coordinate("pipeline")
        return [other for other in range(self.shape.world) if other != rank and Mesh(self.shape, other).coordinate("pipeline") == stage]

    def _excess(self, rank: int) -> list[float]:
        peers = self._peers(rank)
        return [look[rank].own - statistics.median(look[peer].own for peer in peers) for look in self._window] if peers else []

    def _late_ranks(self, now: Mapping[int, RankTimes]) -> Iterator[Late]:
        for rank in range(self.shape.world):
            excess = self._excess(rank)
            if not excess:
                continue
            own, by = statistics.median(look[rank].own for look in self._window), statistics.median(excess)
            whole = statistics.median(look[rank].whole for look in self._window)
            # One that was late goes on being it until half of the excess has ended, however it scatters.
            was_late = f"rank {rank}" in self.late
            least = 1 + (self.factor - 1) / (2 if was_late else 1)
            scatter = _SIGMA_OF_MAD * statistics.median(abs(value - by) for value in excess)
            is_clear = was_late or by > STANDARD_ERRORS * _ERROR_OF_MEDIAN * scatter / math.sqrt(len(excess))
            if own >= least * (own - by) and by >= max(LEAST_EXCESS_S, LEAST_SHARE * whole) and is_clear:
                yield self._late_rank(rank, now[rank], own, by, whole)

    def _late_rank(self, rank: int, times: RankTimes, own: float, by: float, whole: float) -> Late:
        peers = self._peers(rank)

        def of_phase(of: int, phase: str) -> float:
            return statistics.median(look[of].own_s.get(phase, 0.0) for look in self._window)

        phases = {name for look in self._window for name in look[rank].own_s}
        over = {phase: of_phase(rank, phase) - statistics.median(of_phase(peer, phase) for peer in peers) for phase in phases}
        phase = max(sorted(over), key=over.__getitem__)
        waits = {group: statistics.median(statistics.median(look[peer].waited_s.get(group, 0.0) for peer in peers) for look in self._window)
                 for group in {name for look in self._window for peer in peers for name in look[peer].waited_s}}  # fmt: skip
        group = max(sorted(waits), key=waits.__getitem__, default="")
        where = f" on {times.node}" if times.node else ""
        text = (
            f"rank {rank}{where} is a straggler: its own work takes {own:.3g} s of a step of {whole:.3g} s, and that of ranks with equal work {own - by:.3g} s "
            f"(medians of {len(self._window)} looks); most of it is in '{phase}' ({of_phase(rank, phase):.3g} s, {over[phase]:.3g} s more)"
        )
        text += f"; the others wait for it in collectives of '{group}'" if group else ""
        detail = {"rank": rank, "node": times.node, "phase": phase, "own_s": own, "usual_s": own - by, "step_s": whole, "group": group, "reason": text}
        return Late(f"rank {rank}", False, text, detail)

    # -- links -------------------------------------------------------------------------------------------------------------

    def _late_links(self, now: Mapping[int, RankTimes]) -> Iterator[Late]:
        shortest = {link: min(look[link] for look in self._links if link in look) for link in {link for look in self._links for link in look}}
        # The least that a rank waits is what the collectives themselves take: the last rank to arrive does not wait.
        share = min(statistics.median(1 - look[rank].own / look[rank].whole if look[rank].whole else 0.0 for look in self._window) for rank in now)
        for link, seconds in sorted(shortest.items()):
            others = [value for other, value in shortest.items() if other != link]
            past = self._usual_links.get(link, seconds)
            usual = statistics.median(others) if len(others) + 1 >= _FEWEST_LINKS else past
            self._usual_links[link] = min(past, seconds)
            factor = LINK_FACTOR / (2 if f"link {link}" in self.late else 1)
            if seconds < factor * usual or seconds - usual < LEAST_ROUND_TRIP_S or share < LEAST_WAIT_SHARE:
                continue
            waits = {group: statistics.median(look[rank].waited_s.get(group, 0.0) for look in self._window for rank in look)
                     for group in {name for look in self._window for step in look.values() for name in step.waited_s}}  # fmt: skip
            group = max(sorted(waits), key=waits.__getitem__, default="")
            text = (
                f"the link between {link.replace(' - ', ' and ')} is slow: a round trip takes {1000 * seconds:.3g} ms, and {1000 * usual:.3g} ms "
                f"{'over the other links' if len(others) + 1 >= _FEWEST_LINKS else 'before'}; every rank waits in collectives for at least {share:.0%} of a "
                f"step, most in those of '{group}'"
            )
            detail = {"link": link.split(" - "), "round_trip_s": seconds, "usual_s": usual, "wait_share": share, "group": group, "reason": text}
            yield Late(f"link {link}", True, text, detail)


def _since(now: RankTimes, before: RankTimes) -> _Step:
    steps = now.steps - before.steps

    def each(sums: Mapping[str, float], earlier: Mapping[str, float]) -> dict[str, float]:
        return {name: (value - earlier.get(name, 0.0)) / steps for name, value in sums.items()}

    return _Step(each(now.own_s, before.own_s), each(now.waited_s, before.waited_s))


def _links_of(times: Sequence[RankTimes]) -> dict[str, float]:
    """Returns the round trip between each two nodes, the shortest that a rank of either has measured."""
    nodes = {each.host: each.node for each in times if each.host}
    found: dict[str, float] = {}
    for each, (peer, seconds) in itertools.chain.from_iterable(((one, item) for item in one.round_trip_s.items()) for one in times):
        if each.host and peer in nodes and nodes[peer] != each.node:
            link = " - ".join(sorted((each.node, nodes[peer])))
            found[link] = min(seconds, found.get(link, seconds))
    return found
