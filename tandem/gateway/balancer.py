"""Which of several backends that can all serve a request gets it. Pure functions of the backends' load."""

import random
from collections.abc import Callable, Sequence

from tandem.gateway.backend import Backend

Balance = Callable[[Sequence[Backend]], Backend]


def least_tokens(backends: Sequence[Backend]) -> Backend:
    """Returns the backend with the fewest outstanding tokens for its weight; of equal ones that which was taken longest ago, so that requests that
    come one after the other do not all go to the first."""
    return min(backends, key=lambda backend: (backend.load, backend.last_taken))


def power_of_two(draw: random.Random) -> Balance:
    """Returns the balancer that draws two backends and takes the better one (Mitzenmacher, "The power of two choices in randomized load balancing",
    2001): several gateways that know only their own requests do not all choose the same backend."""

    def pick(backends: Sequence[Backend]) -> Backend:
        return least_tokens(draw.sample(backends, 2)) if len(backends) > 2 else least_tokens(backends)

    return pick


def round_robin() -> Balance:
    """Returns the balancer that takes the backends in turn, each as often as its weight says (start-time fair queueing): one that is new, or was away,
    begins at the turn of the others and does not make up for those that it missed."""
    turns: dict[str, float] = {}
    now = 0.0

    def pick(backends: Sequence[Backend]) -> Backend:
        nonlocal now
        for backend in backends:
            turns[backend.name] = max(turns.get(backend.name, 0.0), now)
        chosen = min(backends, key=lambda backend: (turns[backend.name], backend.last_taken))
        now = turns[chosen.name]
        turns[chosen.name] = now + 1 / chosen.config.weight
        return chosen

    return pick


def balancer(name: str) -> Balance:
    """Returns the balancer of the key ``balance``, for requests without a prefix."""
    if name == "power_of_two":
        return power_of_two(random.Random())
    return round_robin() if name == "round_robin" else least_tokens
