"""Section ``traces``: whether spans are sent to an OpenTelemetry collector, and where."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from tandem.types.errors import UserError

TracesProtocol = Literal["http/protobuf", "grpc"]
REQUEST_RATIO = 0.01
"""The share of requests that are traced if nothing says otherwise, and of the many parts of a step. Steps of runs take seconds each, and are all traced."""


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Spans for Jaeger, Tempo or any OpenTelemetry collector, over OTLP. Without the section there are none; `traces: {}` has the defaults. Headers, such as a
    token of the collector, and certificates come from OpenTelemetry's variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`). See
    `observability.md`."""

    endpoint: str = "http://127.0.0.1:4318"
    """Address of the collector. With `http/protobuf` and no path, `/v1/traces` is added; the usual port of `grpc` is 4317."""
    protocol: TracesProtocol = "http/protobuf"
    """The protocol of the endpoint: `http/protobuf` or `grpc`."""
    sample_ratio: float | None = None
    """Share of the traces that begin here which are recorded. Empty: 1 for the steps of a run, 0.01 for the requests of a gateway or server. A request with a
    `traceparent` keeps its sampling decision. It is also the share of the parts of a recorded step of which there may be thousands (requests to the engine,
    episodes, calls of reward functions), besides the first of each kind; empty: 0.01."""
    timeout_s: float = 10.0
    """Time limit for sending one batch of spans, with its repetitions."""
    max_queue_size: int = 8192
    """Spans that wait to be sent, at most. Further ones are dropped and counted in `tandem_traces_dropped_spans_total`."""

    def check(self) -> None:
        check_endpoint("'traces.endpoint'", self.endpoint)
        if self.sample_ratio is not None and not 0 <= self.sample_ratio <= 1:
            raise UserError(f"'traces.sample_ratio' is {self.sample_ratio:g}; it must be between 0 (none) and 1 (all)")
        if not 0 < self.timeout_s <= 600:
            raise UserError(f"'traces.timeout_s' is {self.timeout_s:g}; it must be above 0 and at most 600")
        if not 1 <= self.max_queue_size <= 10**6:
            raise UserError(f"'traces.max_queue_size' is {self.max_queue_size}; it must be between 1 and 1000000")

    def ratio(self, default: float) -> float:
        """Returns ``sample_ratio``, ``default`` if it is empty."""
        return default if self.sample_ratio is None else self.sample_ratio


def check_endpoint(name: str, endpoint: str) -> None:
    """Raises ``UserError`` where the ``endpoint`` that the option ``name`` has is no address of a collector."""
    parts = _split(endpoint)
    if parts is None or parts[0] not in ("http", "https") or not parts[1]:
        raise UserError(f"{name} is {endpoint!r}; give the address of a collector, for example http://127.0.0.1:4318")
    if parts[2]:
        raise UserError(f"{name} has a user or a password, which would be written to files; use OTEL_EXPORTER_OTLP_HEADERS")


def _split(endpoint: str) -> tuple[str, str, bool] | None:
    """Returns the scheme and the host of an address and whether it has a user; ``None`` where it is no address."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        return None
    if not endpoint.isprintable() or " " in endpoint:
        return None
    return parts.scheme, parts.hostname or "", parts.username is not None or parts.password is not None
