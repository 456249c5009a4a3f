"""The preflight of a run's nodes, over its store: each node measures itself, asks the first one for the time, and reduces with others; the first one collects.

Keys under ``preflight/`` of the run: ``reports/NODE``, ``pings/NODE`` and ``pongs/NODE`` (clocks), ``nodes`` (which reduce), ``pairs/...`` (where two meet),
``links/NODE``.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.cluster.health.links import measure_links
from tandem.cluster.health.measure import measure_node
from tandem.config.cluster import ClusterConfig
from tandem.config.machine import MachineConfig
from tandem.runtime.coordination.store import Store, WatchTimeout
from tandem.runtime.health.compare import Finding, findings
from tandem.runtime.health.node_report import NodeReport, read_report
from tandem.storage.folder_manifest import replace_file
from tandem.types import UserError

KEYS = "preflight/"
_REPORTS, _PINGS, _PONGS, _NODES, _LINKS = (f"{KEYS}{name}" for name in ("reports/", "pings/", "pongs/", "nodes", "links/"))
FILE = "preflight.json"
_LOOK_S = 1.0
_LINKS_SHARE = 0.5
"""Of the time: the part that is left for the links when a node does not report."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``fit``: the nodes that may hold pods, in order. ``found``: what is wrong with the others."""

    reports: Sequence[NodeReport]
    found: Sequence[Finding]
    fit: Sequence[str]


def check_nodes(nodes: Sequence[str]) -> None:
    """Raises ``UserError`` for a node that is in the list twice."""
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    if twice:
        raise UserError(f"node '{twice[0]}' is {nodes.count(twice[0])} times in the list of nodes; name each once")


def run_on_node(store: Store, node: str, host: str, machine: MachineConfig, timeout_s: float) -> None:
    """The part of ``node``: measures it, and its links with the nodes that the first one names. ``host``: its address for others."""
    ends = time.monotonic() + timeout_s
    report = measure_node(node, machine)
    asked = time.time()
    store.put(_PINGS + node, b"")
    with contextlib.suppress(WatchTimeout):
        pong = float(store.watch(_PONGS + node, 0, max(0.0, ends - time.monotonic())).value)
        answered = time.time()
        report = replace(report, clock_offset_s=pong - (asked + answered) / 2, clock_error_s=(answered - asked) / 2)
    store.put(_REPORTS + node, report.to_json().encode())
    with contextlib.suppress(WatchTimeout):
        nodes = json.loads(store.watch(_NODES, 0, max(0.0, ends - time.monotonic())).value)
        if node in nodes:
            device = "cuda" if report.devices else "cpu"
            store.put(_LINKS + node, json.dumps(measure_links(store, node, nodes, host, device, lambda: ends - time.monotonic())).encode())


def preflight(
    store: Store, nodes: Sequence[str], config: ClusterConfig, is_over: Callable[[], bool] = lambda: False, kinds: Mapping[str, str] | None = None
) -> Outcome:
    """The part of the first node: answers the others, waits for them, and compares. ``is_over``: whether to wait no longer. ``kinds``: of the nodes, whose
    devices and speeds are compared with those of their kind; ``None``: all are of one."""
    check_nodes(nodes)
    began, answered = time.monotonic(), set[str]()

    def wait(prefix: str, expected: Sequence[str], share: float) -> dict[str, bytes]:
        """Returns the values under ``prefix`` by node, when all ``expected`` have one."""
        while True:
            # Before the look, which so sees what came last.
            is_late = is_over() or time.monotonic() - began > share * config.preflight_timeout_s
            entries = store.list(KEYS)
            for entry in entries:
                node = entry.key.removeprefix(_PINGS)
                if entry.key.startswith(_PINGS) and node not in answered:
                    answered.add(node)
                    store.put(_PONGS + node, repr(time.time()).encode())
            there = {entry.key.removeprefix(prefix): entry.value for entry in entries if entry.key.startswith(prefix)}
            if is_late or all(node in there for node in expected):
                return there
            with contextlib.suppress(WatchTimeout):
                store.watch_prefix(KEYS, entries, _LOOK_S)

    try:
        told = wait(_REPORTS, nodes, 1 - _LINKS_SHARE)
        reports = [read_report(told[node], f"the report of node {node}") for node in nodes if node in told]
        if len(reports) > 1 and not is_over():
            able = [report.node for report in reports]
            store.put(_NODES, json.dumps(able).encode())
            links = {node: json.loads(value) for node, value in wait(_LINKS, able, 1).items()}
            reports = [replace(report, links=links.get(report.node, {})) for report in reports]
    finally:
        for entry in store.list(KEYS):
            store.delete(entry.key)
    waited_s = (1 - _LINKS_SHARE) * config.preflight_timeout_s
    is_ended = time.monotonic() - began < waited_s
    silent = "could not be measured; see the output above" if is_ended else f"did not answer within {waited_s:g} s, half of cluster.preflight_timeout_s"
    found = findings(reports, {node: silent for node in nodes if node not in told}, config, kinds=kinds)
    unfit = {each.node for each in found}
    return Outcome(reports, found, [node for node in nodes if node not in unfit])


def check_outcome(outcome: Outcome, nodes: Sequence[str], config: ClusterConfig) -> Sequence[Finding]:
    """Returns what is wrong with the nodes that spares take the places of. Raises ``UserError``, in one line, if the run cannot begin on those that are fit:
    one is missing that no spare is there for, the first one is not fit, or nodes were set up differently."""
    needed = len(nodes) - config.spares
    setup = [each.text for each in outcome.found if each.is_setup]
    if setup:
        raise UserError("; ".join(setup))
    if outcome.found and (len(outcome.fit) < needed or nodes[0] not in outcome.fit):
        have = f"{len(outcome.fit)} of {len(nodes)} nodes are fit and the run needs {needed} (cluster.spares is {config.spares})"
        first = "" if nodes[0] in outcome.fit else f", and the first one, {nodes[0]}, which has the controller"
        raise UserError(f"{'; '.join(each.text for each in outcome.found)}: {have}{first}; repair or exclude them, or have more spares")
    return outcome.found


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Writes the outcome to ``FILE`` in ``folder``, by one atomic rename."""
    value = {"reports": [asdict(report) for report in outcome.reports], "found": [asdict(each) for each in outcome.found]}
    replace_file(folder / FILE, json.dumps(value, indent=1) + "\n")
