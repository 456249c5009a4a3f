"""The hardware of a run's node for Prometheus: processor, memory, disks and network of the machine, and each process of the run. GPUs, and the
memory of processes on other nodes, are those of ``tandem.runtime.health.gauges``."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.runtime.health.gauges import BY_NAME, RESIDENT_MEMORY
from tandem.runtime.health.run_processes import PROCESS_LABELS, named, process_labels, ranks_by_pid, run_processes
from tandem.runtime.machine.usage import NodeUsage, node_usage


class Hardware:
    """Of the machine that this process is on. ``labels``: of every series."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = {**labels, "node": socket.gethostname()}

    def collect(self, directory: Path | None = None, elsewhere: Sequence[tuple[Mapping[str, str], float]] = ()) -> Iterator[Metric]:
        """Yields the series. ``directory``: of the run, once it is known. ``elsewhere``: labels and resident bytes of processes, as the watches of all nodes
        tell them; those that this process sees itself are left out."""
        yield from self._node(node_usage())
        yield from self._processes(directory, elsewhere)

    def _node(self, usage: NodeUsage) -> Iterator[Metric]:
        yield self._counter("tandem_node_cpu_seconds", "Seconds of all cores of the machine.", "mode", usage.cpu_s)
        yield self._counter("tandem_node_disk_bytes", "Bytes read from the machine's disks, and written.", "direction",
                            {"read": usage.disk_read_bytes, "written": usage.disk_written_bytes})  # fmt: skip
        yield self._counter("tandem_node_network_bytes", "Bytes over the machine's network interfaces, the loopback left out.", "direction",
                            {"received": usage.received_bytes, "sent": usage.sent_bytes})  # fmt: skip
        values = {"cores": ("Cores of the machine.", usage.cores), "memory_bytes": ("Memory of the machine.", usage.memory_bytes),
                  "memory_available_bytes": ("Memory that processes can still have.", usage.memory_available_bytes)}  # fmt: skip
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(f"tandem_node_{name}", text, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), float(value))
            yield family

    def _processes(self, directory: Path | None, elsewhere: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[Metric]:
        labels = (*self._labels, *PROCESS_LABELS)
        cpu = CounterMetricFamily("tandem_process_cpu_seconds", "Processor time of each process of the run on this machine.", labels=labels)
        memory = GaugeMetricFamily(RESIDENT_MEMORY, BY_NAME[RESIDENT_MEMORY].text, labels=labels)
        threads = GaugeMetricFamily("tandem_process_threads", "Its threads.", labels=labels)
        ranks, seen = ranks_by_pid(directory), set[tuple[str, str]]()
        for each in run_processes(os.getpid(), directory, "tandem"):
            values = (*self._labels.values(), *process_labels(named(each), ranks.get(each.pid)).values())
            seen.add((self._labels["node"], str(each.pid)))
            cpu.add_metric(values, each.cpu_s)
            memory.add_metric(values, each.resident_bytes)
            threads.add_metric(values, each.threads)
        for given, value in elsewhere:
            if (given["node"], given["pid"]) not in seen:
                memory.add_metric(tuple({**self._labels, **given}[label] for label in labels), value)
        yield from (cpu, memory, threads)

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._labels, label))
        for key, value in values.items():
            family.add_metric((*self._labels.values(), key), float(value))
        return family
