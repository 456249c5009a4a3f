"""The hardware of a run's node for Prometheus: processor, memory, disks and network of the machine, and each process of the run. GPUs are those of
``tandem.runtime.health.gauges``, of every node."""

import os
import socket
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.runtime.machine.usage import NodeUsage, node_usage, processes_below


class Hardware:
    """Of the machine that this process is on. ``labels``: of every series."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = {**labels, "node": socket.gethostname()}

    def collect(self) -> Iterator[Metric]:
        yield from self._node(node_usage())
        yield from self._processes()

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

    def _processes(self) -> Iterator[Metric]:
        labels = (*self._labels, "process", "pid")
        cpu = CounterMetricFamily("tandem_process_cpu_seconds", "Processor time of each process of the run on this machine.", labels=labels)
        memory = GaugeMetricFamily("tandem_process_resident_memory_bytes", "Its resident memory.", labels=labels)
        threads = GaugeMetricFamily("tandem_process_threads", "Its threads.", labels=labels)
        for each in processes_below(os.getpid()):
            values = (*self._labels.values(), each.name, str(each.pid))
            cpu.add_metric(values, each.cpu_s)
            memory.add_metric(values, each.resident_bytes)
            threads.add_metric(values, each.threads)
        yield from (cpu, memory, threads)

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._labels, label))
        for key, value in values.items():
            family.add_metric((*self._labels.values(), key), float(value))
        return family
