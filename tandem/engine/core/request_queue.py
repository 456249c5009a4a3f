"""Prefills that wait for admission, in the order of their priority and arrival."""

import heapq
from collections import Counter
from collections.abc import Iterator

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.request import Prefill


class RequestQueue:
    """A heap by ``Prefill.order``. Prefills that were preempted in a step enter it with the next one."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Prefill]] = []
        self._preempted: list[Prefill] = []

    def __iter__(self) -> Iterator[Prefill]:
        """All of them, also those whose request was aborted and which have not been dropped yet."""
        yield from (prefill for _, prefill in self._heap)
        yield from self._preempted

    def push(self, prefill: Prefill) -> None:
        heapq.heappush(self._heap, (prefill.order, prefill))

    def push_preempted(self, prefill: Prefill) -> None:
        """Takes a prefill whose sequences were preempted in this step."""
        self._preempted.append(prefill)

    def requeue(self, counts: Counter[Transition]) -> None:
        """Lets the sequences that were preempted in the last step wait."""
        for prefill in self._preempted:
            if not prefill.is_void:
                for sequence in prefill.sequences:
                    move(sequence, Transition.REQUEUE, counts)
                self.push(prefill)
        self._preempted.clear()

    def peek(self) -> Prefill | None:
        """Returns the prefill that goes first, without taking it out. Those of aborted requests are dropped on the way."""
        while self._heap and self._heap[0][1].is_void:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Prefill:
        return heapq.heappop(self._heap)[1]
