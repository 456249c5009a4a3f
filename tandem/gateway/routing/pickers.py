"""Which backend gets a request, by the work before it at each of them."""

import random
from collections.abc import Callable, Sequence

from tandem.gateway.backend import Backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.routing.hashing import home_of

Picker = Callable[[InferenceRequest, Sequence[Backend], Sequence[float]], Backend]
"""Takes a request, at least one backend, and the score of each."""


def least(request: InferenceRequest, backends: Sequence[Backend], scores: Sequence[float]) -> Backend:
    """Returns the backend with the lowest score; of equal ones that which was taken longest ago, so that requests that come one after the other do not all
    go to the first."""
    return min(zip(backends, scores, strict=True), key=lambda each: (each[1], each[0].last_taken))[0]


def power_of_two(draw: random.Random) -> Picker:
    """Returns the picker that draws two backends and takes the better one (Mitzenmacher, "The power of two choices in randomized load balancing",
    2001): several gateways that know only their own requests do not all choose the same backend."""

    def pick(request: InferenceRequest, backends: Sequence[Backend], scores: Sequence[float]) -> Backend:
        drawn = draw.sample(range(len(backends)), 2) if len(backends) > 2 else range(len(backends))
        return least(request, [backends[i] for i in drawn], [scores[i] for i in drawn])

    return pick


def round_robin() -> Picker:
    """Returns the picker that takes the backends in turn, each as often as its capacity says (start-time fair queueing): one that is new, or was away,
    begins at the turn of the others and does not make up for those that it missed."""
    turns: dict[str, float] = {}
    now = 0.0

    def pick(request: InferenceRequest, backends: Sequence[Backend], scores: Sequence[float]) -> Backend:
        nonlocal now
        for backend in backends:
            turns[backend.name] = max(turns.get(backend.name, 0.0), now)
        chosen = min(backends, key=lambda backend: (turns[backend.name], backend.last_taken))
        now = turns[chosen.name]
        turns[chosen.name] = now + 1 / chosen.capacity
        return chosen

    return pick


def consistent_hash(bound: float) -> Picker:
    """Returns the picker that takes the first backend in the order of the request's key that has less than ``1 + bound`` times its share of the outstanding
    tokens, this request's included (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018). The key: the session, else the
    beginning of the prompt, else the client."""

    def pick(request: InferenceRequest, backends: Sequence[Backend], scores: Sequence[float]) -> Backend:
        key = request.session or (f"prefix {request.prefix[0]}" if request.prefix else request.client)
        total = max(1, request.prompt_tokens + request.max_tokens) + sum(backend.outstanding_tokens for backend in backends)
        share = (1 + bound) * total / sum(backend.capacity for backend in backends)
        # One at least has no more than its share of what is outstanding, which is less than of the total.
        return home_of(key, [backend for backend in backends if backend.load < share])

    return pick
