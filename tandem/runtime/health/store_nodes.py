"""The nodes of all runs that share an etcd and a prefix, as the store tells of them: members on leases, what they have, cordons. Reads only."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.runtime.coordination.cordons import CORDONS, cordons
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.store import Entry
from tandem.runtime.health.node_report import REPORTS
from tandem.runtime.health.node_watch import HEALTH
from tandem.types import UserError

MEMBERS = "members/"
_CLUSTER = "@cluster"


@dataclass(frozen=True, slots=True)
class StoreNode:
    """A node in the store.

    Args:
        node: the name of its pod.
        run: the run that it is a member of; empty for one that is only cordoned in the cluster.
        machine: the name of the host; empty: not known.
        devices: the names of its GPUs; none where it has none, or has not told yet.
        state: ``joined`` (a member on a lease) or ``cordoned``.
        lease: the id of the lease that its membership is on, 0 without one.
        reason, by, at: of the cordon: why, the run or the person, and Unix seconds.
        seen_s: Unix time of its last look at itself, 0 before the first; ``findings``: what that found wrong, one line each.
    """

    node: str
    run: str
    machine: str = ""
    devices: tuple[str, ...] = ()
    state: str = "joined"
    lease: int = 0
    reason: str = ""
    by: str = ""
    at: float = 0.0
    seen_s: float = 0.0
    findings: tuple[str, ...] = ()


def nodes_in(store: EtcdStore, run: str = "") -> Sequence[StoreNode]:
    """Returns the nodes whose keys are in ``store``, which has the prefix of all runs, by run and name; of one ``run`` and the cluster where it is named."""
    told: dict[str, dict[str, dict[str, Entry]]] = {}
    for entry in store.list(f"{run}/" if run else ""):
        of_run, _, key = entry.key.partition("/")
        for kind in (MEMBERS, CORDONS, HEALTH, REPORTS):
            if key.startswith(kind):
                told.setdefault(of_run, {}).setdefault(kind, {})[key.removeprefix(kind)] = entry
    everywhere = cordons(_Part(store, f"{_CLUSTER}/"))  # type: ignore[arg-type]
    found = []
    for of_run, kinds in told.items():
        if of_run == _CLUSTER:
            continue
        held = {**everywhere, **cordons(_Part(store, f"{of_run}/"))}  # type: ignore[arg-type]
        members, health, reports = kinds.get(MEMBERS, {}), kinds.get(HEALTH, {}), kinds.get(REPORTS, {})
        own = {name for name in held if name in kinds.get(CORDONS, {})}
        for name in sorted(members.keys() | own):
            facts = _value(members.get(name))
            machine = str(facts.get("machine", facts.get("host", "")))
            look = _value(health.get(name))
            devices = tuple(str(gpu.get("name", "")) for gpu in look.get("gpus", ())) or tuple(_value(reports.get(name)).get("devices", ()))
            cordon, lease = held.get(name) or held.get(machine), store.lease_of(f"{of_run}/{MEMBERS}{name}") if name in members else 0
            node = StoreNode(name, of_run, machine, devices, lease=lease, seen_s=float(look.get("at_s", 0.0)), findings=_findings(look))
            if cordon is not None:
                node = replace(node, state="cordoned", reason=cordon.reason, by=cordon.by, at=cordon.at)
            found.append(node)
    shown = {name for each in found for name in (each.node, each.machine)}
    found += [StoreNode(name, "", state="cordoned", reason=each.reason, by=each.by, at=each.at) for name, each in everywhere.items() if name not in shown]
    return sorted(found, key=lambda each: (each.run, each.node))


def _findings(look: Mapping[str, Any]) -> tuple[str, ...]:
    faults = [f"{gpu}: {what}" for gpu, what in look.get("faults", {}).items()]
    return (*look.get("fatal", ()), *faults, *(f"the memory of {name} grows without end" for name in look.get("leaks", ())))


def _value(entry: Entry | None) -> Mapping[str, Any]:
    try:
        value = json.loads(entry.value) if entry is not None else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Part:
    """The part of a store under ``prefix``."""

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def list(self, prefix: str) -> Sequence[Entry]:
        entries = self._store.list(self._prefix + prefix)
        return [Entry(entry.key.removeprefix(self._prefix), entry.value, entry.revision) for entry in entries]


def check_node(name: str) -> None:
    """Raises ``UserError`` for what cannot be the name of a node."""
    if not re.fullmatch(r"\w[\w.-]{0,252}", name):
        raise UserError(f"node '{name[:100]}' is no name of a node; use letters, digits, '.', '_' and '-'")
