"""Keeps breakers from opening for too many backends at once (Envoy's ``max_ejection_percent``)."""

from collections.abc import Sequence

from tandem.gateway.backend import Backend


def bound_ejections(backends: Sequence[Backend], share: float) -> None:
    """Lets the breaker of each backend open only while at most ``share`` of those that serve a model of its would be out: if nearly all fail, their load is the
    likelier reason, and fewer of them would fail the more."""
    for backend in backends:
        backend.breaker.may_open = lambda backend=backend: may_be_ejected(backend, backends, share)  # type: ignore[misc]


def may_be_ejected(backend: Backend, backends: Sequence[Backend], share: float) -> bool:
    """Returns whether ``backend`` and those that are out already are at most ``share`` of the backends with a model in common."""
    beside = [each for each in backends if each is backend or set(each.models) & set(backend.models)]
    out = sum(each is backend or each.breaker.state != "closed" for each in beside)
    return out <= share * len(beside)
