"""The nodes of a run: from its journal and its metrics database, and of one that trains under etcd from the coordination store as well."""

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.coordination import CoordinationConfig
from tandem.config.recipe import load_config
from tandem.dashboard.hardware import newest_by_node
from tandem.dashboard.open_run import OpenRun
from tandem.report.hidden import without_secrets
from tandem.report.run_facts import NODE_KEY, RunFacts
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.health.run_health import EVENTS
from tandem.runtime.health.store_nodes import StoreNode, nodes_in
from tandem.runtime.records.run_lock import lock_holder
from tandem.types import RunError, UserError

STORE_S = 2.0
"""How long an etcd may take to answer before the page shows what the run's files say."""
_STATES = ("node", "cordon")
"""Events that tell a node's state."""


@dataclass(frozen=True, slots=True)
class Node:
    """A row of the table.

    Args:
        node: its name in the run: of the pod or the machine.
        state: ``controller``, ``joined``, ``in use``, ``spare``, ``cordoned`` or ``gone``.
        devices: the names of its GPUs, or their addresses where no more is known; ``cpu`` where the run computes there.
        lease: the id of the lease that its membership is on, as etcdctl shows it; empty: none, or the run has ended.
        reason, by, since_s: of its cordon: why, the run or the person, and Unix seconds (0: not known).
        findings: what its health watch sees and is not over, one line each.
        seen_s: Unix time of its last sign of life; 0: not known.
    """

    node: str
    state: str = ""
    devices: tuple[str, ...] = ()
    lease: str = ""
    reason: str = ""
    by: str = ""
    since_s: float = 0.0
    findings: tuple[str, ...] = ()
    seen_s: float = 0.0


def nodes(run: OpenRun) -> dict[str, Any]:
    """Returns the nodes of ``run`` by name, ``source``, where their states are from, and ``problem``, why the store was not asked successfully."""
    facts, problem = run.facts()
    known, source = _recorded(run, facts), "the run's journal" + (" and metrics database" if newest_by_node(run) else "")
    if lock_holder(run.directory) is not None:
        try:
            stored = _stored(run.directory)
        except (UserError, RunError, OSError, ValueError) as error:
            stored, problem = None, f"the coordination store cannot be read: {error}"
        if stored is not None:
            source = "the coordination store"
            for each in stored:
                known[each.node] = _with_store(known.get(each.node, Node(each.node)), each)
    shown = [asdict(known[name]) for name in sorted(known, key=lambda name: (known[name].state != "controller", name))]
    return {"nodes": without_secrets("", shown), "source": source, "problem": problem}


def _recorded(run: OpenRun, facts: RunFacts | None) -> dict[str, Node]:
    """Returns what journal and metrics say of each node."""
    known: dict[str, Node] = {}
    at = lambda name: known.setdefault(name, Node(name))
    try:
        with run.journal() as journal:
            own, device = journal.get(NODE_KEY), journal.get("device")
    except RunError:
        own = device = None
    if own:
        known[own] = Node(str(own), "controller", (str(device),) if device else ())
    open_findings: dict[tuple[Any, ...], tuple[str, str]] = {}
    for event in facts.events if facts is not None else ():
        kind, detail = event["kind"], event["detail"]
        name = str(detail.get("node") or own or "")
        if kind in _STATES and detail.get("node"):
            state = str(detail.get("state", "cordoned"))
            is_held = state == "cordoned"
            since_s = float(event.get("time_s") or 0.0) if is_held else 0.0
            known[name] = replace(at(name), state=state, reason=str(detail.get("reason", "")) if is_held else "", since_s=since_s)
        elif (begun := kind.removesuffix("_over")) in EVENTS and name:
            key = (begun, *(detail.get(part) for part in ("node", "rank", "link", "process")))
            if kind == begun:
                open_findings[key] = (name, str(detail.get("reason", begun)))
            else:
                open_findings.pop(key, None)
    for name, text in open_findings.values():
        known[name] = replace(at(name), findings=(*at(name).findings, text))
    for name, (seen_s, gpus) in newest_by_node(run).items():
        known[name] = replace(at(name), seen_s=seen_s, devices=gpus or at(name).devices, state=at(name).state or "in use")
    return known


def _stored(directory: Path) -> list[StoreNode] | None:
    """Returns the nodes of a run in its etcd, ``None`` where its store is a file that no other node has."""
    config: CoordinationConfig | None = getattr(load_config(directory / "config.yaml"), "coordination", None)
    if config is None or config.store != "etcd":
        return None
    patient = replace(config, cluster_id="", deadline_s=min(STORE_S, config.deadline_s))
    with closing(EtcdStore(patient, f"{config.prefix.rstrip('/')}/")) as store:
        return [each for each in nodes_in(store, directory.resolve().name) if each.run]


def _with_store(known: Node, told: StoreNode) -> Node:
    """Returns a node as the store has it now; whether it is in use or spare is in the journal alone."""
    state = "cordoned" if told.state == "cordoned" else known.state if known.state in ("in use", "spare", "controller") else told.state
    lease = f"{told.lease:x}" if told.lease else ""
    findings = tuple(dict.fromkeys((*told.findings, *known.findings)))
    return replace(
        known, state=state, devices=told.devices or known.devices, lease=lease, reason=told.reason, by=told.by, since_s=told.at, findings=findings,
        seen_s=max(told.seen_s, known.seen_s),
    )  # fmt: skip
