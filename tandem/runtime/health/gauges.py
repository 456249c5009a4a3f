"""The metrics of the health of a run: their names, what they say, and their values from what was measured. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.runtime.health.node_watch import NodeReading
from tandem.runtime.health.run_processes import PROCESS_LABELS, process_labels
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.health.stragglers import Late


@dataclass(frozen=True, slots=True)
class HealthMetric:
    """``labels``: beside those of the run."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...]


RESIDENT_MEMORY = "tandem_process_resident_memory_bytes"
"""The suffix is that of Prometheus' clients (https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics)."""
METRICS = (
    HealthMetric("tandem_rank_own_seconds", "counter", "Seconds of the rank's own work, by phase: without its waits for others.", ("rank", "node", "phase")),
    HealthMetric("tandem_rank_late_seconds", "gauge", "By how much of a step the rank is later than those with equal work (median).", ("rank", "node")),
    HealthMetric("tandem_rank_straggler", "gauge", "1 while the rank is named as a straggler.", ("rank", "node")),
    HealthMetric("tandem_link_slow", "gauge", "1 for a link between two nodes that is named as slow.", ("link",)),
    HealthMetric("tandem_link_round_trip_seconds", "gauge", "Shortest round trip from the node to the other one now.", ("node", "peer")),
    HealthMetric("tandem_gpu_fault", "gauge", "1 while something is wrong with the GPU: throttled, ECC, PCIe.", ("node", "gpu")),
    HealthMetric("tandem_gpu_temperature_celsius", "gauge", "Temperature of the GPU.", ("node", "gpu")),
    HealthMetric("tandem_gpu_power_watts", "gauge", "Power that the GPU draws.", ("node", "gpu")),
    HealthMetric("tandem_gpu_utilization_ratio", "gauge", "Share of the time in which a kernel ran.", ("node", "gpu")),
    HealthMetric("tandem_gpu_uncorrected_ecc_errors", "gauge", "Uncorrected ECC errors since the driver was loaded.", ("node", "gpu")),
    HealthMetric("tandem_gpu_xid_errors", "gauge", "Xid errors in the node's kernel log since the run began there.", ("node", "xid")),
    HealthMetric("tandem_node_unfit", "gauge", "1 once a fatal error of the node's GPUs was found.", ("node",)),
    HealthMetric("tandem_node_last_look_timestamp_seconds", "gauge", "Unix time of the node's last look at itself: its heartbeat.", ("node",)),
    HealthMetric("tandem_node_loop_lag_seconds", "gauge", "Longest time that the watch of the node had to wait for its turn.", ("node",)),
    HealthMetric(RESIDENT_MEMORY, "gauge", "Resident memory of a process of the run.", ("node", *PROCESS_LABELS)),
    HealthMetric("tandem_process_memory_growth", "gauge", "Growth of its resident bytes in bytes a second, over the last looks.", ("node", *PROCESS_LABELS)),
    HealthMetric("tandem_process_memory_leak", "gauge", "1 while the memory of the process is named as growing without end.", ("node", *PROCESS_LABELS)),
)  # fmt: skip
BY_NAME: Mapping[str, HealthMetric] = {metric.name: metric for metric in METRICS}

Reading = tuple[str, dict[str, str], float]
"""The name of a metric, its labels and its value."""


def of_ranks(times: Sequence[RankTimes], excesses: Mapping[int, float], late: Mapping[str, Late]) -> list[Reading]:
    """Returns the readings of ranks and links."""
    found: list[Reading] = []
    nodes = {each.host: each.node for each in times if each.host}
    for each in times:
        labels = {"rank": str(each.rank), "node": each.node}
        found += [("tandem_rank_own_seconds", {**labels, "phase": phase}, seconds) for phase, seconds in each.own_s.items()]
        found.append(("tandem_rank_straggler", labels, float(f"rank {each.rank}" in late)))
        if each.rank in excesses:
            found.append(("tandem_rank_late_seconds", labels, excesses[each.rank]))
    trips: dict[tuple[str, str], float] = {}
    for each in times:
        for peer, seconds in each.round_trip_s.items():
            if peer in nodes and nodes[peer] != each.node:
                pair = (each.node, nodes[peer])
                trips[pair] = min(seconds, trips.get(pair, seconds))
    found += [("tandem_link_round_trip_seconds", {"node": node, "peer": peer}, seconds) for (node, peer), seconds in trips.items()]
    links = {" - ".join(sorted(pair)) for pair in trips} | {key.removeprefix("link ") for key, each in late.items() if each.is_link}
    # A series is there from the beginning on, so that rules have one to look at.
    return found + [("tandem_link_slow", {"link": link}, float(f"link {link}" in late)) for link in sorted(links) or ["all"]]


def of_node(reading: NodeReading) -> list[Reading]:
    """Returns the readings of a node."""
    node = {"node": reading.node}
    found: list[Reading] = [("tandem_node_unfit", node, float(bool(reading.fatal))), ("tandem_node_loop_lag_seconds", node, reading.lag_s)]
    found.append(("tandem_node_last_look_timestamp_seconds", node, reading.at_s))
    of_gpu: tuple[tuple[str, str, float], ...] = (
        ("temperature_c", "tandem_gpu_temperature_celsius", 1.0), ("power_w", "tandem_gpu_power_watts", 1.0),
        ("utilization_percent", "tandem_gpu_utilization_ratio", 0.01), ("uncorrected", "tandem_gpu_uncorrected_ecc_errors", 1.0),
    )  # fmt: skip
    for gpu in reading.gpus:
        labels = {**node, "gpu": str(gpu["bus"])}
        found += [(name, labels, factor * float(gpu[key])) for key, name, factor in of_gpu if gpu[key] is not None]
        found.append(("tandem_gpu_fault", labels, float(any(str(gpu["bus"]) in what for what in reading.faults))))
    if not reading.gpus:
        # None, or none that answers.
        found.append(("tandem_gpu_fault", {**node, "gpu": "all"}, float(bool(reading.faults))))
    found += [("tandem_gpu_xid_errors", {**node, "xid": number}, float(count)) for number, count in reading.xids.items()]
    for name, (size, grows) in reading.processes.items():
        labels = {**node, **process_labels(name, reading.ranks.get(name))}
        found.append((RESIDENT_MEMORY, labels, float(size)))
        found.append(("tandem_process_memory_growth", labels, grows))
        found.append(("tandem_process_memory_leak", labels, float(name in reading.leaks)))
    return found


def as_values(readings: Sequence[Reading]) -> list[list[Any]]:
    """Returns ``readings`` as plain values, for another process."""
    return [[name, labels, value] for name, labels, value in readings]
