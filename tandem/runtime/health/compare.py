"""What is wrong with which node: the reports of all nodes against the median of the fleet, the limits of section ``cluster``, and each other."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.config.cluster import ClusterConfig
from tandem.runtime.health.node_report import NodeReport

FEWEST = 3
"""Nodes from which on there is a median to compare with: of two that differ it is not known which one is wrong."""
_UNITS = {"matrix products": (1e9, "GFLOP/s"), "memory": (1e9, "GB/s"), "disk": (1e6, "MB/s")}
_WORDS = {"tandem": "Tandem", "python": "Python", "torch": "torch", "instruction set": "instruction set", "driver": "NVIDIA driver"}


@dataclass(frozen=True, slots=True)
class Finding:
    """``node`` is not fit for the run. ``text``: one line that names it, what was measured and what to do. ``is_setup``: the fault is how the nodes were set
    up, which no spare mends, so the run does not begin."""

    node: str
    text: str
    is_setup: bool = False


def findings(
    reports: Sequence[NodeReport], missing: Mapping[str, str], config: ClusterConfig, controller: NodeReport | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Sequence[Finding]:  # fmt: skip
    """Returns what is wrong, the nodes in order. ``reports``: of the nodes that answered, that of the run's controller first unless it is given as
    ``controller``, with its versions alone. ``missing``: why the others did not. ``kinds``: of the nodes, where they are not alike: devices, speeds
    and links are compared within a kind."""
    found = [Finding(node, f"node {node} {why}") for node, why in missing.items()]
    if not reports:
        return found
    for report in reports:
        found += [Finding(report.node, f"node {report.node}: {what}: {why}") for what, why in report.failed.items()]
        found += _space(report, config)
        found += setup_findings(report, controller or reports[0], config)
    kind_of = {report.node: (kinds or {}).get(report.node, "") for report in reports}
    for kind in dict.fromkeys(kind_of.values()):
        alike = [report for report in reports if kind_of[report.node] == kind]
        found += [*_devices(alike), *_slow(alike, config.min_speed)]
    found += _links(reports, config.min_speed, kind_of)
    order = {node: number for number, node in enumerate([*(report.node for report in reports), *missing])}
    return sorted(found, key=lambda each: order[each.node])


def _space(report: NodeReport, config: ClusterConfig) -> Iterator[Finding]:
    for name, place, key in (("disk", "in its folder for temporary files", "min_disk_gib"), ("shm", "in /dev/shm", "min_shm_gib")):
        free, least = report.free_bytes.get(name, 0) / 2**30, getattr(config, key)
        if name not in report.failed and free < least:
            text = f"node {report.node} has {free:.3g} GiB free {place}, less than cluster.{key} ({least:g}); make room, or exclude the node"
            yield Finding(report.node, text)


def setup_findings(report: NodeReport, first: NodeReport, config: ClusterConfig) -> Sequence[Finding]:
    """Returns what is wrong with how the node of ``report`` is set up, beside ``first``, that of the run's controller: its clock and its versions."""
    return [*clock_findings(report, first.node, config), *_versions(report, first)]


def clock_findings(report: NodeReport, first: str, config: ClusterConfig) -> Iterator[Finding]:
    """Yields a finding if the clock of ``report`` differs from that of node ``first`` by more than the limit, beyond doubt."""
    apart = abs(report.clock_offset_s) - report.clock_error_s
    if apart > config.max_clock_offset_s:
        side = "behind" if report.clock_offset_s > 0 else "ahead of"
        text = (
            f"the clock of node {report.node} is {abs(report.clock_offset_s):.1f} s {side} that of {first}, more than cluster.max_clock_offset_s "
            f"({config.max_clock_offset_s:g}); start its time service (chronyd or ntpd)"
        )
        yield Finding(report.node, text, is_setup=True)


def _versions(report: NodeReport, first: NodeReport) -> Iterator[Finding]:
    for name, word in _WORDS.items():
        here, there = report.versions.get(name, ""), first.versions.get(name, "")
        if here != there and here and there:
            fix = "use nodes of one kind (slurm.constraint)" if name == "instruction set" else "install the same version on all nodes"
            yield Finding(report.node, f"node {report.node} has {word} {here} and {first.node} has {there}; {fix}", is_setup=True)


def _devices(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yields nodes without the GPUs that most nodes have; of two kinds that are as frequent, the first node's is right."""
    usual = Counter(report.devices for report in reports).most_common(1)[0][0]
    for report in reports:
        if report.devices != usual and "device" not in report.failed:
            text = f"node {report.node} has {_listed(report.devices)}, and most nodes have {_listed(usual)}; see 'nvidia-smi' there"
            yield Finding(report.node, text)


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(devices).items()) or "no GPU"


def _slow(reports: Sequence[NodeReport], share: float) -> Iterator[Finding]:
    if len(reports) < FEWEST:
        return
    for what in sorted({what for report in reports for what in report.speeds}):
        unit, word = next(value for name, value in _UNITS.items() if what.startswith(name))
        values = {report.node: report.speeds[what] for report in reports if what in report.speeds}
        median = statistics.median(values.values())
        for node, value in values.items():
            if value < share * median:
                of_median = f"{value / median:.0%} of the median of {len(values)} nodes ({median / unit:.3g})"
                yield Finding(node, f"node {node} is slow: {what} {value / unit:.3g} {word}, {of_median}")


def _links(reports: Sequence[NodeReport], share: float, kind_of: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the fewest nodes without which every pair that was measured is connected, and within a kind fast: again and again the node with the most bad
    links, of several the last one, because the first is the controller's."""
    rates: dict[frozenset[str], float] = {}
    for report in reports:
        for other, rate in report.links.items():
            pair = frozenset((report.node, other))
            rates[pair] = min(rate, rates.get(pair, rate))
    medians: dict[str, float] = {}
    for kind in set(kind_of.values()):
        alike = {node for node, each in kind_of.items() if each == kind}
        # A bad node spoils two of the three links of three nodes, but not the fastest link of the others.
        fastest = [max(own) for node in alike if (own := [rate for pair, rate in rates.items() if node in pair and pair <= alike])]
        if len(alike) >= FEWEST and fastest:
            medians[kind] = statistics.median(fastest)
    bad: dict[frozenset[str], float] = {}
    for pair, rate in rates.items():
        kinds = sorted({kind_of.get(node, "") for node in pair})
        if not rate or (len(kinds) == 1 and rate < share * medians.get(kinds[0], 0.0)):
            bad[pair] = rate
    while bad:
        counts = Counter(node for pair in bad for node in pair)
        worst = max(reversed([report.node for report in reports]), key=lambda node: counts[node])
        others = {node: rate for pair, rate in bad.items() if worst in pair for node in pair - {worst}}
        failed = sorted(node for node, rate in others.items() if not rate)
        slow = sorted(f"{node} ({rate / 1e9:.3g} GB/s)" for node, rate in others.items() if rate)
        text = " and ".join([
            *([f"could not reduce with {', '.join(failed)}"] if failed else []),
            *([f"is slow with {', '.join(slow)}, where the median of the nodes' fastest links is {medians[kind_of[worst]] / 1e9:.3g} GB/s"] if slow else []),
        ])  # fmt: skip
        yield Finding(worst, f"node {worst} {text}; look at its network")
        bad = {pair: rate for pair, rate in bad.items() if worst not in pair}
