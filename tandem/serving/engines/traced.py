"""The spans of the requests that an engine's process is sent."""

from dataclasses import dataclass

from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.processing.request_spans import record_request
from tandem.runtime.traces.context import SpanContext, parse_traceparent
from tandem.serving.engines.messages import EngineRequest


@dataclass
class _Traced:
    parent: SpanContext
    request: EngineRequest
    tokens: int = 0


class TracedRequests:
    """The requests of an engine whose callers are traced; others cost one look-up."""

    def __init__(self) -> None:
        self._traced: dict[str, _Traced] = {}

    def add(self, request: EngineRequest) -> None:
        """Follows ``request`` from now on, if it has a ``traceparent`` of a sampled trace."""
        parent = parse_traceparent(request.traceparent) if request.traceparent else None
        if parent is not None and parent.sampled:
            self._traced[request.id] = _Traced(parent, request)

    def take(self, outputs: list[RequestOutput]) -> None:
        """Looks at the outputs of a step."""
        if self._traced:
            for output in outputs:
                traced = self._traced.get(output.request_id)
                if traced is not None:
                    traced.tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    if output.finished:
                        del self._traced[output.request_id]
                        request = traced.request
                        if output.times is not None:
                            given = (request.id, len(request.prompt_token_ids), request.params, traced.tokens)
                            record_request(traced.parent, *given, output, output.times)

    def forget(self, request_ids: list[str]) -> None:
        """Ends requests that have no output."""
        for request_id in request_ids:
            self._traced.pop(request_id, None)
