"""The figures of the spans that this process sends to a collector, for Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.runtime.traces.exporter import SENT


class SentSpans(Collector):
    """``labels``: of every series."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("tandem_traces_exported_spans", "Spans that the collector has received.", SENT.exported),
            ("tandem_traces_dropped_spans", "Spans that the collector did not receive: it did not answer, or too many were waiting.", SENT.dropped),
        ):
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
