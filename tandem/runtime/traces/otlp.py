"""Spans as those of OpenTelemetry's SDK, which its exporters encode."""

from functools import cached_property, lru_cache

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags

import tandem
from tandem.runtime.traces.spans import Kind, Process, Span

_KINDS: dict[Kind, SpanKind] = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SCOPE = InstrumentationScope("tandem", tandem.__version__)


def readable(span: Span) -> ReadableSpan:
    """Returns ``span`` as the SDK's."""
    trace_id = span.context.trace_id
    return ReadableSpan(
        span.name, _context(trace_id, span.context.span_id), _context(trace_id, span.parent_id, is_remote=True) if span.parent_id else None,
        _resource(span.process), span.attributes, [Event(name, attributes, at) for name, at, attributes in span.events], (), _KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(), start_time=span.start_ns, end_time=span.end_ns, instrumentation_scope=_SCOPE,
    )  # fmt: skip


def _context(trace_id: str, span_id: str, *, is_remote: bool = False) -> OtelContext:
    return OtelContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))


class _Resource(Resource):
    """Is a key of each of its spans as they are encoded, and OpenTelemetry's makes JSON of itself for that."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=1024)
def _resource(process: Process) -> Resource:
    """Returns the process by OpenTelemetry's names (https://opentelemetry.io/docs/specs/semconv/resource/)."""
    values: dict[str, str | int] = {
        "service.name": f"tandem-{process.service.replace('_', '-')}", "service.version": tandem.__version__,
        "service.instance.id": f"{process.host}:{process.pid}", "host.name": process.host, "process.pid": process.pid,
    }  # fmt: skip
    if process.run:
        values |= {"service.namespace": process.run, "tandem.run": process.run}
    if process.rank >= 0:
        values["tandem.rank"] = process.rank
    return _Resource(values)
