"""Which tenant's request is next: the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2).

Each tenant has a counter of the service it has received. The waiting request of the tenant with the smallest counter is served next, so that tenants that
always have requests waiting receive the same service, whatever they send: in any time, the service of two of them differs by at most
``2 * max(prompt_weight * longest prompt, output_weight * tokens in flight)`` (theorem 4.4).
"""

import bisect
from collections import OrderedDict
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
    ``other_weight``: of those that are not in it. ``classes``: tenants of a lower class (by default 0) are served first, and fairly among themselves."""

    weights: Mapping[str, float] = field(default_factory=dict)
    other_weight: float = 1.0
    classes: Mapping[str, int] = field(default_factory=dict)
    other_class: int = 0
    _waiting: dict[str, list[tuple[int, int, Item]]] = field(default_factory=dict)
    _pushed: int = 0
    _counters: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    _last_left: str | None = None

    def follow(self, weights: Mapping[str, float], other_weight: float, classes: Mapping[str, int], other_class: int) -> None:
        """Takes other weights and classes, for the service from now on."""
        self.weights, self.other_weight, self.classes, self.other_class = weights, other_weight, classes, other_class

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._waiting.values() for _, _, item in items)

    def length(self, tenant: str) -> int:
        """Returns how many requests of ``tenant`` wait."""
        return len(self._waiting.get(tenant, ()))

    def ahead(self, tenant: str) -> int:
        """Returns about how many requests are served before one that ``tenant`` adds now: its own, as many of each other tenant of its class, and all of lower
        classes."""
        own, level = self.length(tenant), self._class(tenant)
        others = [(self._class(other), len(items)) for other, items in self._waiting.items() if other != tenant]
        return own + sum(count if other < level else min(count, own + 1) for other, count in others if other <= level)

    def push(self, tenant: str, item: Item, priority: int = 0) -> None:
        """Adds a request. Those of one tenant are served by ``priority``, the lowest first. The counter of a tenant that had none waiting is lifted to the
        others': time in which it asked for nothing is no credit."""
        if tenant not in self._waiting:
            counter = self._counters.get(tenant, 0.0)
            beside = [other for other in self._waiting if self._class(other) == self._class(tenant)]
            if beside:
                counter = max(counter, min(self._counters[other] for other in beside))
            elif self._last_left is not None:
                counter = max(counter, self._counters.get(self._last_left, 0.0))
            self._counters[tenant] = counter
            self._counters.move_to_end(tenant)
            self._waiting[tenant] = []
        self._pushed += 1
        bisect.insort(self._waiting[tenant], (priority, self._pushed, item))
        self._forget_idle()

    def next(self) -> tuple[str, Item]:
        """Returns the next request and its tenant. The queue must not be empty."""
        tenant = min(self._waiting, key=lambda each: (self._class(each), self._counters[each]))
        return tenant, self._waiting[tenant][0][2]

    def pop(self) -> tuple[str, Item]:
        """Removes and returns the next request and its tenant. The queue must not be empty."""
        tenant, item = self.next()
        del self._waiting[tenant][0]
        self._left(tenant)
        return tenant, item

    def remove(self, tenant: str, item: Item) -> None:
        """Removes a request whose client has left, if it is there."""
        items = self._waiting.get(tenant, [])
        place = next((place for place, each in enumerate(items) if each[2] == item), None)
        if place is not None:
            del items[place]
            self._left(tenant)

    def charge(self, tenant: str, service: float) -> None:
        """Counts ``service`` that ``tenant`` has received."""
        self._counters[tenant] = self._counters.get(tenant, 0.0) + service / self.weights.get(tenant, self.other_weight)

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def _class(self, tenant: str) -> int:
        return self.classes.get(tenant, self.other_class)

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
