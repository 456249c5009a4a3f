"""How much work a request waits for at each backend. Pure functions; everything is counted in tokens, so that parts can be added.

A score is what is added or saved at each of ``backends``, in their order.
"""

from collections.abc import Callable, Sequence

from tandem.gateway.backend import Backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.routing.hashing import home_of
from tandem.gateway.routing.prefix_index import PrefixIndex

Score = Callable[[InferenceRequest, Sequence[Backend]], list[float]]


def load(request: InferenceRequest, backends: Sequence[Backend]) -> list[float]:
    """Returns the outstanding tokens of each backend for its capacity."""
    return [backend.load for backend in backends]


def away_from(zone: str, tokens: int) -> Score:
    """Returns the score that adds ``tokens`` for backends that are not in ``zone``."""
    return lambda request, backends: [0 if backend.config.zone == zone else tokens for backend in backends]


def cached_prefix(index: PrefixIndex) -> Score:
    """Returns the score of the prompt's tokens that a backend has computed before and still holds."""
    return lambda request, backends: [index.cached_tokens(request.prefix, backend) if request.prefix else 0 for backend in backends]


def displaced_prefix(index: PrefixIndex, weight: float) -> Score:
    """Returns the score of what a backend evicts for a request's prompt, though several requests have used it: who comes next computes it again. Preble
    (Srivatsa et al., 2024) counts what is evicted, too, times the rate at which it was hit."""
    return lambda request, backends: [
        weight * index.displaced_tokens(request.prefix, backend) / backend.capacity if request.prefix else 0.0 for backend in backends
    ]


def session(request: InferenceRequest, backends: Sequence[Backend]) -> list[float]:
    """Returns the tokens of the prompt for the backend of the request's session: what was said before is in its cache."""
    home = home_of(request.session, backends) if request.session else None
    return [request.prompt_tokens if backend is home else 0 for backend in backends]


def work_before(costs: Sequence[Score], savings: Sequence[tuple[float, Score]]) -> Score:
    """Returns the score of all work before the first token of a request: all ``costs``, and the tokens of its prompt that the ``savings``, each times its
    weight, do not save. At a backend that has other requests those tokens count twice, since these requests wait for them too; an idle backend computes them
    at no other request's cost. No more than the prompt is saved, whatever the savings say, so that no preference ever leads into an overloaded backend."""

    def score(request: InferenceRequest, backends: Sequence[Backend]) -> list[float]:
        added = [sum(parts) for parts in zip(*(cost(request, backends) for cost in costs), strict=True)]
        if not savings:
            return added
        saved = [sum(parts) for parts in zip(*([weight * part for part in one(request, backends)] for weight, one in savings), strict=True)]
        return [
            more + (2 if backend.attempts else 1) * max(0, request.prompt_tokens - less) / backend.capacity
            for backend, more, less in zip(backends, added, saved, strict=True)
        ]

    return score
