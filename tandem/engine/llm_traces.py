"""Spans of the requests of ``LLM`` and ``AsyncLLM``, whose process is its caller's: each request is a trace, as in vLLM, to the collector at an address."""

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tandem.config.traces import TracesConfig
from tandem.engine.processing.outputs import RequestOutput, RequestTimes
from tandem.engine.processing.request_spans import record_request
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.runtime.traces.context import HEADER, SpanContext, new_trace, parse_traceparent
from tandem.runtime.traces.exporter import Exporter, check_traces
from tandem.runtime.traces.spans import SPANS, UNNAMED, OpenSpan, begin, begin_first
from tandem.types import UserError


class SharedExporter:
    """The exporter of this process, which several engines may use at once: its spans go to one collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._config: TracesConfig | None = None
        self._exporter: Exporter | None = None
        self._users = 0

    def open(self, config: TracesConfig) -> None:
        """Begins to send the spans of this process as ``config`` says. Raises ``UserError`` where another engine sends them elsewhere."""
        check_traces(config)
        with self._lock:
            if self._users and config != self._config:
                assert self._config is not None
                raise UserError(f"'otlp_traces_endpoint' is {config.endpoint!r}, and another engine here sends to {self._config.endpoint!r}; give one")
            if not self._users:
                if SPANS.process.service == UNNAMED:
                    SPANS.identify("llm")
                self._config, self._exporter = config, Exporter(config)
            self._users += 1

    def close(self) -> None:
        """Sends what is left where nothing else uses it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._exporter is not None:
                self._exporter.close()
                self._exporter = None


EXPORTER = SharedExporter()


def open_exporter(config: TracesConfig | None) -> SharedExporter | None:
    """Returns what the spans of an engine are sent by as ``config`` says, to be closed with it; ``None`` without one. Raises ``UserError``."""
    if config is None:
        return None
    EXPORTER.open(config)
    return EXPORTER


def begun(name: str, trace_headers: Mapping[str, str] | None) -> OpenSpan | None:
    """Begins the span ``name`` of a request below the span that its headers name, or a trace; ``None`` where its sender wants no record."""
    given = next((value for header, value in (trace_headers or {}).items() if header.lower() == HEADER), "")
    parent = parse_traceparent(given) if given else None
    return begin_first(name, new_trace(1.0)) if parent is None else begin(name, parent)


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt_tokens: int
    params: SamplingParams


class TracedCalls:
    """The requests of an engine that is called in this process."""

    def __init__(self, exporter: SharedExporter) -> None:
        self._exporter = exporter
        self._asked: dict[str, _Asked] = {}

    def added(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        self._asked[request_id] = _Asked(prompt_tokens, params)

    def ended(self, output: RequestOutput) -> None:
        """Records the request of ``output`` as a trace."""
        asked = self._asked.pop(output.request_id, None)
        if asked is not None:
            tokens = sum(len(completion.token_ids) for completion in output.outputs)
            times = output.times or RequestTimes(0.0)
            # Of a trace that begins with the request: it has no parent.
            record_request(SpanContext(new_trace(1.0).trace_id, ""), output.request_id, asked.prompt_tokens, asdict(asked.params), tokens, output, times)

    def dropped(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def close(self) -> None:
        self._exporter.close()
