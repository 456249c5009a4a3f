"""The hardware of a run's node for Prometheus: processor, memory, disks, network and GPUs of the machine, and each process of the run."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.runtime.machine.nvidia_health import GpuHealth, read_smi
from tandem.runtime.machine.usage import NodeUsage, node_usage, processes_below
from tandem.types import RunError

_GPU_EVERY_S = 10.0
"""``nvidia-smi`` takes about a second."""


class Hardware:
    """Of the machine that this process is on. ``labels``: of every series."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = {**labels, "node": socket.gethostname()}
        self._gpus: list[GpuHealth] = []
        self._gpus_read = -_GPU_EVERY_S
        self._has_gpus = shutil.which("nvidia-smi") is not None

    def collect(self) -> Iterator[Metric]:
        yield from self._node(node_usage())
        yield from self._processes()
        if self._has_gpus:
            yield from self._of_gpus()

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

    def _of_gpus(self) -> Iterator[Metric]:
        now = time.monotonic()
        if now - self._gpus_read >= _GPU_EVERY_S:
            self._gpus_read = now
            try:
                self._gpus = list(read_smi())
            except RunError:
                # The health monitor says what is wrong with it; here its values are missing.
                self._gpus = []
        percent = lambda gpu: None if gpu.utilization_percent is None else gpu.utilization_percent / 100
        shown: Sequence[tuple[str, str, Callable[[GpuHealth], float | None]]] = (
            ("utilization_ratio", "Share of the time in which the GPU computed.", percent),
            ("temperature_celsius", "Its temperature.", lambda gpu: gpu.temperature_c),
            ("power_watts", "Its power.", lambda gpu: gpu.power_w),
        )
        for name, text, value_of in shown:
            family = GaugeMetricFamily(f"tandem_gpu_{name}", text, labels=(*self._labels, "gpu", "name"))
            for gpu in self._gpus:
                value = value_of(gpu)
                if value is not None:
                    family.add_metric((*self._labels.values(), gpu.bus, gpu.name), float(value))
            yield family

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._labels, label))
        for key, value in values.items():
            family.add_metric((*self._labels.values(), key), float(value))
        return family
