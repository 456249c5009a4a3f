"""Which of the backends that can serve a request are looked at. Pure functions; each returns at least one if it is given one."""

from collections.abc import Callable, Sequence

from tandem.gateway.backend import Backend
from tandem.gateway.inference_request import InferenceRequest

Filter = Callable[[InferenceRequest, Sequence[Backend]], Sequence[Backend]]


def in_time(request: InferenceRequest, backends: Sequence[Backend]) -> Sequence[Backend]:
    """Returns the backends that will, as far as can be seen, begin to answer within the time that the client waits; all if none will."""
    limit_s = request.timeout_s
    if limit_s is None:
        return backends
    return [backend for backend in backends if backend.first_byte_s(request.tokens) <= limit_s] or backends


def answering(backends: Sequence[Backend]) -> Sequence[Backend]:
    """Returns the backends that do more than compute prompts for others; all if there is no other."""
    return [backend for backend in backends if backend.role != "prefill"] or backends


def with_room(request: InferenceRequest, backends: Sequence[Backend]) -> Sequence[Backend]:
    """Returns the backends that have less than ``max_requests``. If there is none, it is a retry, which finds a place beside those that have theirs."""
    return [backend for backend in backends if backend.room > 0] or backends
