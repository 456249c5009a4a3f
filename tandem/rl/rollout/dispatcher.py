"""Which rollout worker draws which group, and when. Imports no torch; the benchmarks simulate many engines with it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a group is expected to cost: the number of its ``sequences``, the tokens of the ``longest`` one and of all (``tokens``)."""

    sequences: int
    longest: float
    tokens: float


class Dispatcher:
    """Assigns groups to workers: those with the longest expected sequence first, each to the worker with the fewest outstanding tokens.

    A worker that has no room keeps what it has, so that a group waits here until a worker is free for it: ``capacity`` is the number of sequences that
    a worker draws at once. A group is never divided, because its samples share the cache of their prompt. Not thread-safe.
    """

    def __init__(self, loads: Sequence[GroupLoad], workers: int, capacity: int) -> None:
        self._loads, self._capacity = loads, capacity
        self._queue = deque(sorted(range(len(loads)), key=lambda group: (-loads[group].longest, group)))
        self._held: list[list[int]] = [[] for _ in range(workers)]
        self._taken: list[set[int]] = [set() for _ in range(workers)]
        self._away: set[int] = set()
        self._assign()

    @property
    def is_done(self) -> bool:
        """Whether every group is finished."""
        return not self._queue and not any(self._held)

    def holds(self, worker: int) -> bool:
        """Returns whether ``worker`` has an unfinished group."""
        return bool(self._held[worker])

    def outstanding_tokens(self, worker: int) -> float:
        """Returns the expected tokens of the unfinished groups of ``worker``."""
        return sum(self._loads[group].tokens for group in self._held[worker])

    def take(self, worker: int) -> list[int]:
        """Returns the groups that ``worker`` is to begin, longest first."""
        new = [group for group in self._held[worker] if group not in self._taken[worker]]
        self._taken[worker].update(new)
        return new

    def finish(self, worker: int, group: int) -> None:
        """Records that ``worker`` has drawn ``group``, and assigns groups to the room that is free now."""
        self._held[worker].remove(group)
        self._taken[worker].discard(group)
        self._assign()

    def lose(self, worker: int) -> list[int]:
        """Records that ``worker`` died. Returns its unfinished groups, which are assigned again."""
        lost = list(self._held[worker])
        self._held[worker].clear()
        self._taken[worker].clear()
        self._away.add(worker)
        self._queue.extendleft(reversed(lost))
        self._assign()
        return lost

    def rejoin(self, worker: int) -> None:
        """Records that ``worker`` was replaced."""
        self._away.discard(worker)
        self._assign()

    def _assign(self) -> None:
        while self._queue:
            load = self._loads[self._queue[0]]
            free = [worker for worker in range(len(self._held)) if worker not in self._away and self._has_room(worker, load)]
            if not free:
                return
            # Without an expectation the groups are counted.
            least = min(free, key=lambda worker: (self.outstanding_tokens(worker), len(self._held[worker]), worker))
            self._held[least].append(self._queue.popleft())

    def _has_room(self, worker: int, load: GroupLoad) -> bool:
        held = sum(self._loads[group].sequences for group in self._held[worker])
        return not held or held + load.sequences <= self._capacity
