"""Sends the spans of this process to an OpenTelemetry collector from a thread of its own, which nothing waits for.

A collector that is down, slow or answers nonsense costs spans: they are counted, and the first loss is logged once until a batch arrives again. Needs the extra
``traces``.
"""

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tandem.config.traces import TracesConfig
from tandem.runtime.traces.spans import MOST_SPANS, SPANS, Span, Spans
from tandem.types.errors import UserError
from tandem.types.one_line import describe

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)
PERIOD_S = 1.0
"""Seconds between two batches; ``BATCH`` spans are sent at once."""
BATCH = 512
CLOSE_S = 2.0
"""Seconds in which the end of a process waits for its last spans."""
_PACKAGES = {"http/protobuf": "opentelemetry.exporter.otlp.proto.http", "grpc": "opentelemetry.exporter.otlp.proto.grpc"}


def check_traces(config: TracesConfig | None) -> None:
    """Raises ``UserError`` where a package is missing. A collector that does not answer is no error: it may start later."""
    if config is None:
        return
    try:
        is_there = importlib.util.find_spec(_PACKAGES[config.protocol]) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise UserError("section 'traces' needs OpenTelemetry's exporters, which are not installed; pip install 'tandem-rl[traces]', or remove the section")


@dataclass
class Sent:
    """Spans of this process and those that it was handed: ``exported`` to a collector, and ``failed`` to be."""

    exported: int = 0
    failed: int = 0

    @property
    def dropped(self) -> int:
        """Spans that no collector has: those that failed, and those for which there was no room."""
        return self.failed + SPANS.dropped


SENT = Sent()
"""The counts of this process."""


class Exporter:
    """Sends what ``spans`` has every ``PERIOD_S``, and when there are ``BATCH``, until ``close``."""

    def __init__(self, config: TracesConfig, spans: Spans = SPANS) -> None:
        self._spans, self._config, self._is_failing = spans, config, False
        spans.limit = config.max_queue_size
        self._is_closing, self._wakes = False, threading.Event()
        spans.many, spans.on_many = min(BATCH, config.max_queue_size) - 1, self._wakes.set
        self._exporter = _otlp(config)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what is left, within ``CLOSE_S``; what is not sent then is dropped."""
        self._is_closing = True
        self._wakes.set()
        self._thread.join(CLOSE_S)
        with contextlib.suppress(Exception):
            self._exporter.shutdown()
        self._thread.join(0.5)
        if left := len(self._spans.take(self._spans.limit)):
            SENT.failed += left
        self._spans.limit, self._spans.many = MOST_SPANS, MOST_SPANS

    def _run(self) -> None:
        while True:
            self._wakes.wait(PERIOD_S)
            self._wakes.clear()
            is_last = self._is_closing
            while len(self._spans):
                if batch := self._spans.take(BATCH):
                    self._send(batch)
            if is_last:
                return

    def _send(self, batch: list[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        from tandem.runtime.traces.otlp import readable

        try:
            is_sent, why = self._exporter.export([readable(span) for span in batch]) is SpanExportResult.SUCCESS, "it did not take them"
        except Exception as error:
            is_sent, why = False, describe(error)
        if is_sent:
            SENT.exported += len(batch)
        else:
            SENT.failed += len(batch)
            if not self._is_failing:
                text = "the collector at %s did not receive %d spans (%s); they are dropped, and nothing waits for it"
                logger.warning(text, self._config.endpoint, len(batch), why)
        self._is_failing = not is_sent


def _otlp(config: TracesConfig) -> "SpanExporter":
    """Returns OpenTelemetry's exporter for ``config``."""
    # It writes a line for every batch that is lost.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(config.endpoint, insecure=urlsplit(config.endpoint).scheme == "http", timeout=config.timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    has_path = urlsplit(config.endpoint).path not in ("", "/")
    return Http(config.endpoint if has_path else f"{config.endpoint.rstrip('/')}/v1/traces", timeout=config.timeout_s)


@contextlib.contextmanager
def exporting(config: TracesConfig | None) -> Iterator[None]:
    """Inside, the spans of this process are sent as ``config`` says, if there is one."""
    if config is None:
        yield
        return
    exporter = Exporter(config)
    try:
        yield
    finally:
        exporter.close()
