"""Which tenant's request is next: the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).

Each tenant has a counter of the service it has received. The waiting request of the tenant with the smallest counter is served next, so that tenants that
always have requests waiting receive the same service, whatever they send: in any time, the service of two of them differs by at most
``2 * max(prompt_weight * longest prompt, output_weight * tokens in flight)`` (theorem 4.4).
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""Service is prompt tokens and twice the generated tokens, as in the paper: a generated token takes a step of its own."""
_MOST_IDLE = 4096
"""Tenants without a waiting request whose counters are kept."""


@dataclass
class FairQueue(Generic[Item]):
    """Waiting items by tenant. ``weights``: a tenant with weight 2 receives twice the service of one with 1.
    ``other_weight``: of those that are not in it."""

    weights: Mapping[str, float] = field(default_factory=dict)
    other_weight: float = 1.0
    _waiting: dict[str, deque[Item]] = field(default_factory=dict)
    _counters: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    _last_left: str | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._waiting.values() for item in items)

    def length(self, tenant: str) -> int:
        """Returns how many requests of ``tenant`` wait."""
        return len(self._waiting.get(tenant, ()))

    def ahead(self, tenant: str) -> int:
        """Returns about how many requests are served before one that ``tenant`` adds now: its own, and as many of each other tenant."""
        own = self.length(tenant)
        return own + sum(min(len(items), own + 1) for other, items in self._waiting.items() if other != tenant)

    def push(self, tenant: str, item: Item) -> None:
        """Adds a request. The counter of a tenant that had none waiting is lifted to the others': time in which it asked for nothing is no credit."""
        if tenant not in self._waiting:
            counter = self._counters.get(tenant, 0.0)
            if self._waiting:
                counter = max(counter, min(self._counters[other] for other in self._waiting))
            elif self._last_left is not None:
                counter = max(counter, self._counters.get(self._last_left, 0.0))
            self._counters[tenant] = counter
            self._counters.move_to_end(tenant)
            self._waiting[tenant] = deque()
        self._waiting[tenant].append(item)
        self._forget_idle()

    def pop(self) -> tuple[str, Item]:
        """Removes and returns the next request and its tenant. The queue must not be empty."""
        tenant = min(self._waiting, key=lambda each: self._counters[each])
        item = self._waiting[tenant].popleft()
        self._left(tenant)
        return tenant, item

    def remove(self, tenant: str, item: Item) -> None:
        """Removes a request whose client has left, if it is there."""
        items = self._waiting.get(tenant)
        if items is not None and item in items:
            items.remove(item)
            self._left(tenant)

    def charge(self, tenant: str, service: float) -> None:
        """Counts ``service`` that ``tenant`` has received."""
        self._counters[tenant] = self._counters.get(tenant, 0.0) + service / self.weights.get(tenant, self.other_weight)

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def _left(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last_left = tenant

    def _forget_idle(self) -> None:
        """Forgets the tenant that came longest ago, if it has gone; with one for each that is added, their number stays bounded."""
        for _ in range(2 if len(self._counters) > _MOST_IDLE + len(self._waiting) else 0):
            oldest = next(iter(self._counters))
            if oldest in self._waiting or oldest == self._last_left:
                self._counters.move_to_end(oldest)
            else:
                del self._counters[oldest]
