"""The gateway's figures in Prometheus' text format; their names begin with ``tandem_gateway_``."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from tandem.gateway.admission import Admission
from tandem.gateway.backend import Backend
from tandem.gateway.routing.prefix_index import PrefixIndex
from tandem.gateway.servers.servers import Servers
from tandem.runtime.exposition.text import exposition

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600)


Kind = TypeVar("Kind", Counter, Histogram)


class _Children(Generic[Kind]):
    """A metric whose children are found by their labels at once: prometheus_client checks the labels at each call."""

    def __init__(self, metric: Kind) -> None:
        self.labels: Callable[..., Kind] = functools.lru_cache(maxsize=4096)(metric.labels)


class Metrics:
    """Counters and histograms of requests; the state of backends is read when the figures are asked for. ``index``: returns what they have cached, if that is
    followed now."""

    def __init__(self, backends: Sequence[Backend], index: Callable[[], PrefixIndex | None]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._backends, self._index = backends, index

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tandem_gateway_{name}", text, labels, registry=self.registry)

        self.requests = _Children(Counter(
            "tandem_gateway_requests", "Requests that were answered, by status (499: the client left).", ("model", "code"), registry=self.registry
        ))  # fmt: skip
        self.attempts = _Children(
            Counter("tandem_gateway_attempts", "Attempts at backends, by what came of them.", ("backend", "outcome"), registry=self.registry)
        )
        self.retries = Counter("tandem_gateway_retries", "Requests given to a further backend.", registry=self.registry)
        self.hedges = Counter("tandem_gateway_hedges", "Second attempts, by whether theirs was the first answer.", ("outcome",), registry=self.registry)
        self.prefills = Counter(
            "tandem_gateway_prefills", "Long prompts: computed apart from the answer, together with it, or failed apart.", ("outcome",), registry=self.registry
        )
        self.resumed = Counter("tandem_gateway_resumed_streams", "Streams that went on at another backend.", registry=self.registry)
        self.shadows = Counter(
            "tandem_gateway_shadow_requests", "Copies for models in the shadow, by what came of them.", ("model", "outcome"), registry=self.registry
        )
        self.first_byte = _Children(Histogram(
            "tandem_gateway_time_to_first_byte_seconds", "From the complete request to the first byte of its answer.", ("model",),
            registry=self.registry, buckets=_SECONDS,
        ))  # fmt: skip
        self.duration = _Children(Histogram(
            "tandem_gateway_request_seconds", "From the complete request to the end of its answer.", ("model",), registry=self.registry, buckets=_SECONDS
        ))  # fmt: skip
        self.limited = Counter("tandem_gateway_limited", "Requests refused by a limit of their key or tenant.", ("limit",), registry=self.registry)
        self.queue_wait = _Children(Histogram(
            "tandem_gateway_queue_wait_seconds", "From the complete request to its turn.", ("model",), registry=self.registry, buckets=_SECONDS
        ))  # fmt: skip
        self.refused = Counter("tandem_gateway_refused", "Requests that were refused or ended for their time or the queue's length.", ("reason",),
                               registry=self.registry)  # fmt: skip
        self._waiting_tokens = gauge("waiting_tokens", "Tokens of the prompts that wait for their turn.", "model")
        self._waiting = gauge("waiting_requests", "Requests that wait for their turn.", "model")
        self._oldest = gauge("oldest_waiting_seconds", "How long the one that waits longest has waited.")
        self._in_flight = gauge("in_flight_requests", "Requests at the backend.", "backend")
        self._outstanding = gauge("outstanding_tokens", "Tokens that the backend has still to compute, estimated.", "backend")
        self._free = gauge("free_cache_tokens", "Room of the KV cache, as a Tandem server says.", "backend")
        self._engine_waiting = gauge("backend_waiting_tokens", "Tokens of prompts that wait in the backend, as a Tandem server says.", "backend")
        self._cached = gauge("prefix_blocks", "Blocks of prompts that the backend probably has in its prefix cache.", "backend")
        self._servers = gauge("servers", "Servers that the gateway has started: ready, loading or leaving.", "model", "role", "state")
        self._wanted = gauge("servers_wanted", "Servers that there should be.", "model", "role")
        self._restarts = gauge("server_restarts", "Servers that have died and were started again.", "model", "role")
        self._updates = gauge("server_updates", "Rolling updates: done, failed (all servers are back) or stuck (not all are).", "model", "role", "outcome")
        self._scaled = gauge("scale_decisions", "Changes of the number of servers, up or down.", "model", "role", "direction")
        self._ready = gauge("backend_ready", "1 if the backend is ready by its probes and not drained by an administrator.", "backend")
        self._breaker = gauge("backend_breaker_open", "0 closed, 0.5 half-open, 1 open.", "backend")

    def forget(self, backend: Backend) -> None:
        """Takes out the state of a backend that is gone; its counters stay."""
        for gauge in (self._in_flight, self._outstanding, self._free, self._engine_waiting, self._cached, self._ready, self._breaker):
            with contextlib.suppress(KeyError):  # Nobody has asked for it yet.
                gauge.remove(backend.name)

    def text(self, admission: Admission, servers: Servers) -> bytes:
        """Returns all figures."""
        for group in servers.groups:
            for state, count in group.states.items():
                self._servers.labels(group.model, group.config.role, state).set(count)
            self._wanted.labels(group.model, group.config.role).set(group.desired)
            self._restarts.labels(group.model, group.config.role).set(group.restarts)
            for outcome, count in group.outcomes.items():
                self._updates.labels(group.model, group.config.role, outcome).set(count)
            for direction, count in group.changes.items():
                self._scaled.labels(group.model, group.config.role, direction).set(count)
        for model, count in admission.waiting.items():
            self._waiting.labels(model).set(count)
            self._waiting_tokens.labels(model).set(admission.waiting_tokens[model])
        self._oldest.set(admission.oldest_s)
        index = self._index()
        if index is None:
            self._cached.clear()
        for backend in self._backends:
            self._in_flight.labels(backend.name).set(len(backend.attempts))
            self._outstanding.labels(backend.name).set(backend.outstanding_tokens)
            if backend.engine is not None:
                self._free.labels(backend.name).set(backend.engine.free_tokens)
                self._engine_waiting.labels(backend.name).set(backend.engine.waiting_tokens)
            if index is not None:
                self._cached.labels(backend.name).set(index.size(backend))
            self._ready.labels(backend.name).set(backend.is_ready)
            self._breaker.labels(backend.name).set({"closed": 0, "half_open": 0.5, "open": 1}[backend.breaker.state])
        return exposition(self.registry)
