"""The virtual token counter: the bound of its paper, weights, and tenants that come and go."""

import random
from dataclasses import dataclass, field

import pytest

from tandem.gateway.fair_queue import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue

LONGEST_PROMPT, LONGEST_ANSWER, BATCH = 200, 100, 8


@dataclass
class Engine:
    """An engine that computes a token of each of ``BATCH`` sequences in a step, as in section 4 of the paper. ``served``: the service that each tenant
    has received after each step, counted here."""

    queue: FairQueue[tuple[int, int]]
    running: list[list[object]] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=dict)
    served: list[dict[str, float]] = field(default_factory=list)

    def step(self) -> None:
        while len(self.running) < BATCH and len(self.queue):
            tenant, (prompt, answer) = self.queue.pop()
            self.queue.charge(tenant, PROMPT_WEIGHT * prompt)
            self.service[tenant] = self.service.get(tenant, 0.0) + prompt
            self.running.append([tenant, answer])
        for sequence in self.running:
            tenant = str(sequence[0])
            self.queue.charge(tenant, OUTPUT_WEIGHT)
            self.service[tenant] += 2.0
            sequence[1] = int(str(sequence[1])) - 1
        self.running = [sequence for sequence in self.running if sequence[1]]
        self.served.append(dict(self.service))


def keep_waiting(queue: FairQueue[tuple[int, int]], draw: random.Random, sizes: dict[str, tuple[int, int]]) -> None:
    for tenant, (prompt, answer) in sizes.items():
        while queue.length(tenant) <= BATCH:  # So that it always has one waiting: a step takes no more than a batch.
            queue.push(tenant, (draw.randint(1, prompt), draw.randint(1, answer)))


@pytest.mark.parametrize("seed", range(5))
def test_the_service_of_tenants_that_always_wait_differs_by_at_most_the_papers_bound(seed: int) -> None:
    draw, engine = random.Random(seed), Engine(FairQueue())
    # Long prompts with short answers, the other way round, and both small.
    sizes = {"reader": (LONGEST_PROMPT, 2), "writer": (2, LONGEST_ANSWER), "small": (3, 3)}
    for _ in range(4000):
        keep_waiting(engine.queue, draw, sizes)
        engine.step()
    bound = 2 * max(PROMPT_WEIGHT * LONGEST_PROMPT, OUTPUT_WEIGHT * BATCH * LONGEST_ANSWER)
    worst = 0.0
    for begin in range(0, 4000, 97):
        for end in range(begin + 1, 4000, 89):
            got = [engine.served[end][tenant] - engine.served[begin].get(tenant, 0.0) for tenant in sizes]
            worst = max(worst, max(got) - min(got))
    assert worst <= bound
    assert worst > 50, "they are not equal by construction"
    total = engine.served[-1]
    assert max(total.values()) < 1.1 * min(total.values())


def test_first_come_first_served_would_break_the_bound() -> None:
    """The same load in the order of arrival, so that the test above could fail."""
    draw, engine = random.Random(0), Engine(FairQueue())
    queue: FairQueue[tuple[int, int]] = engine.queue
    arrivals = [("writer", (2, LONGEST_ANSWER)) if draw.random() < 0.9 else ("small", (3, 3)) for _ in range(2000)]
    for number, (_, item) in enumerate(arrivals):
        queue.push(f"{number:06}", item)
    service = {"writer": 0.0, "small": 0.0}
    for number in range(1500):
        tenant, (prompt, answer) = arrivals[number]
        service[tenant] += prompt + 2 * answer
    assert service["writer"] - service["small"] > 2 * OUTPUT_WEIGHT * BATCH * LONGEST_ANSWER


def test_weights_divide_the_service() -> None:
    draw, engine = random.Random(1), Engine(FairQueue({"gold": 3.0}))
    for _ in range(3000):
        keep_waiting(engine.queue, draw, {"gold": (10, 10), "plain": (10, 10)})
        engine.step()
    assert engine.service["gold"] / engine.service["plain"] == pytest.approx(3.0, rel=0.05)


def test_time_without_requests_is_no_credit_and_a_flood_no_debt_for_ever() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.push("busy", number)
        assert queue.pop() == ("busy", number)
        queue.charge("busy", 50)
    queue.push("busy", 100)
    queue.push("late", 0)
    assert queue.counter("late") == queue.counter("busy") == 5000
    queue.push("late", 1)
    order = []
    for _ in range(3):
        tenant, _ = queue.pop()
        queue.charge(tenant, 50)
        order.append(tenant)
    assert sorted(order[:2]) == ["busy", "late"], "one each, not all of the one that was away"


def test_a_removed_request_is_not_served_and_what_is_ahead_is_counted() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10):
        queue.push("flood", number)
    assert queue.ahead("flood") == 10 and queue.ahead("other") == 1
    queue.push("other", 77)
    assert queue.ahead("other") == 1 + 2
    queue.remove("flood", 0)
    queue.remove("flood", 0)
    queue.remove("nobody", 0)
    assert len(queue) == 10 and 0 not in list(queue)
    assert {queue.pop()[1] for _ in range(10)} == {*range(1, 10), 77} and not len(queue)


def test_the_counters_of_tenants_that_have_gone_are_bounded() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(20_000):
        queue.push(f"tenant {number}", number)
        tenant, _ = queue.pop()
        queue.charge(tenant, 1)
    assert len(queue._counters) <= 4097
