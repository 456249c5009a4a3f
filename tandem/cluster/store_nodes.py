"""The nodes of all runs that share an etcd and a prefix, as the store tells of them: members on leases, what they have, cordons. Reads only."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def nodes_in(store: EtcdStore) -> Sequence[StoreNode]:
    """Returns the nodes whose keys are in ``store``, which has the prefix of all runs, by run and name."""
    told: dict[str, dict[str, dict[str, Entry]]] = {}
    for entry in store.list(""):
        run, _, key = entry.key.partition("/")
        for kind in (MEMBERS, CORDONS, HEALTH, REPORTS):
            if key.startswith(kind):
                told.setdefault(run, {}).setdefault(kind, {})[key.removeprefix(kind)] = entry
    everywhere = cordons(_Part(store, f"{_CLUSTER}/"))  # type: ignore[arg-type]
    found = []
    for run, kinds in told.items():
        if run == _CLUSTER:
            continue
        held = {**everywhere, **cordons(_Part(store, f"{run}/"))}  # type: ignore[arg-type]
        members, health, reports = kinds.get(MEMBERS, {}), kinds.get(HEALTH, {}), kinds.get(REPORTS, {})
        own = {name for name in held if name in kinds.get(CORDONS, {})}
        for name in sorted(members.keys() | own):
            facts = _value(members.get(name))
            machine = str(facts.get("machine", facts.get("host", "")))
            devices = tuple(str(gpu.get("name", "")) for gpu in _value(health.get(name)).get("gpus", ())) or tuple(_value(reports.get(name)).get("devices", ()))
            cordon, lease = held.get(name) or held.get(machine), store.lease_of(f"{run}/{MEMBERS}{name}") if name in members else 0
            if cordon is None:
                found.append(StoreNode(name, run, machine, devices, lease=lease))
            else:
                found.append(StoreNode(name, run, machine, devices, "cordoned", lease, cordon.reason, cordon.by, cordon.at))
    shown = {name for each in found for name in (each.node, each.machine)}
    found += [StoreNode(name, "", state="cordoned", reason=each.reason, by=each.by, at=each.at) for name, each in everywhere.items() if name not in shown]
    return sorted(found, key=lambda each: (each.run, each.node))


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
