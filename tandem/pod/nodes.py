"""The cluster manager of a run, in its controller: which nodes hold pods, which are spares, and which are cordoned. Imports no torch.

It starts no process: a launcher has started a pod on each node, which is a member of the run on a lease. The controller takes in as many as the run has
places; the others wait as spares. A node whose pod was lost too often is cordoned, so that a spare has its place for the rest of the run.
"""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.config.cluster import ClusterConfig
from tandem.runtime.coordination.cordons import Cordon, cordon, cordons
from tandem.runtime.coordination.membership import Member
from tandem.runtime.coordination.store import Store
from tandem.runtime.health.compare import findings
from tandem.runtime.health.node_report import REPORTS, NodeReport, own_versions, read_report
from tandem.runtime.health.node_watch import HEALTH, NodeReading
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

NodeState = Literal["in use", "spare", "cordoned", "gone"]


@dataclass
class Nodes:
    """``run``: its name. ``max_failures``: losses of a pod after which its node is cordoned; 0: never. ``open_cluster``: opens the store of what all runs
    of the cluster share. ``states``: of each node so far; ``held``: the cordons. ``on_reading``: takes what nodes have found of their own health.
    ``preflight``: the limits for nodes whose pods join, and for their reports (``None``: they are not looked at)."""

    run: str = ""
    max_failures: int = 0
    open_cluster: Callable[[], Store] | None = None
    states: dict[str, NodeState] = field(default_factory=dict)
    held: dict[str, Cordon] = field(default_factory=dict)
    preflight: ClusterConfig | None = None
    on_reading: Callable[[NodeReading], None] = lambda reading: None
    _unfit: dict[str, str] = field(default_factory=dict)
    _new: dict[str, tuple[int, str]] = field(default_factory=dict)
    _failures: dict[str, set[int]] = field(default_factory=dict)
    _news: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cluster: Store | None = None
    _told: set[str] = field(default_factory=set)
    _compared: tuple[tuple[str, int], ...] = ()

    def failed(self, node: str, life: int, reason: str) -> None:
        """Notes that the pod on ``node`` was lost in its ``life``, the revision of its joining; once for each."""
        with self._lock:
            if life not in self._failures.get(node, ()):
                self._new.setdefault(node, (life, reason))

    def unfit(self, node: str, reason: str) -> None:
        """Notes that the machine of ``node`` is broken, which concerns all runs: it is cordoned in the cluster, until the cordon is removed."""
        with self._lock:
            self._unfit.setdefault(node, reason)

    def look(self, store: Store) -> None:
        """Reads what the nodes tell of their health. Cordons, in the ``store`` of the run, the nodes that have failed too often, and in the cluster those that
        are broken, and reads all cordons. If the cluster's does not answer, those of it that were read last hold."""
        for entry in store.list(HEALTH):
            self.on_reading(NodeReading.from_json(json.loads(entry.value)))
        for node, reason in {**self._not_fit(store), **self._due()}.items():
            cordon(store, node, reason, self.run)
        self._cordon_unfit(store)
        found = {**self._of_cluster(), **cordons(store)}
        with self._lock:
            self.held = found

    def _not_fit(self, store: Store) -> Mapping[str, str]:
        """Returns the nodes that the preflight finds something wrong with, with all of it in one line. One in use is not judged by later ones."""
        entries = store.list(REPORTS) if self.preflight is not None else []
        seen = tuple((entry.key, entry.revision) for entry in entries)
        if self.preflight is None or seen == self._compared:
            return {}
        self._compared, reports = seen, list[NodeReport]()
        for entry in entries:
            try:
                reports.append(read_report(entry.value, f"the entry '{entry.key}' of the store"))
            except RunError as error:
                logger.warning("%s", error)
        found: dict[str, str] = {}
        for each in findings(reports, {}, self.preflight, NodeReport("the controller", own_versions())):
            if self.states.get(each.node) != "in use":
                found[each.node] = f"{found[each.node]}; {each.text}" if each.node in found else each.text
        for text in found.values():
            logger.warning("preflight: %s; it is not used", text)
        return found

    def why_few(self) -> str:
        """Returns, for a line about too few pods, which nodes this run does not use; empty: none."""
        with self._lock:
            return "".join(f"; node {node} is cordoned: {each.reason}" for node, each in sorted(self.held.items()))

    def _cordon_unfit(self, store: Store) -> None:
        with self._lock:
            unfit = dict(self._unfit)
        for node, reason in unfit.items():
            if self.open_cluster is not None:
                try:
                    self._cluster = self._cluster or self.open_cluster()
                    cordon(self._cluster, node, reason, self.run)
                except UserError as error:
                    logger.warning("node %s could not be cordoned in the cluster yet: %s", node, error)
                    cordon(store, node, reason, self.run)
                    continue
            else:
                cordon(store, node, reason, self.run)
            with self._lock:
                self._unfit.pop(node, None)

    def drained(self, node: str) -> Cordon | None:
        """Returns the cordon by which this run lets ``node`` go, although its pod works; ``None`` without one. What others cordon only takes no new pod."""
        with self._lock:
            held = self.held.get(node)
        return held if held is not None and held.by == self.run else None

    def _of_cluster(self) -> Mapping[str, Cordon]:
        if self.open_cluster is None:
            return {}
        try:
            self._cluster = self._cluster or self.open_cluster()
            return cordons(self._cluster)
        except UserError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning("the cordons of the cluster were not read: %s", error)
            return {node: each for node, each in self.held.items() if each.by != self.run}

    def _due(self) -> dict[str, str]:
        """Returns the nodes to cordon, with the reasons. If several nodes fail and none is left in use, the fault is that of what they share: the network, or
        the store. So does Kubernetes' node controller in full disruption."""
        with self._lock:
            new, self._new = self._new, {}
            in_use = {node for node, state in self.states.items() if state == "in use"}
            if len(new) > 1 and in_use <= new.keys():
                logger.warning("%s were lost at once, which is not counted as a failure of each: %s", ", ".join(sorted(new)), next(iter(new.values()))[1])
                return {}
            due = {}
            for node, (life, reason) in new.items():
                lives = self._failures.setdefault(node, set())
                lives.add(life)
                if self.max_failures and len(lives) >= self.max_failures:
                    due[node] = f"its pod was lost{'' if len(lives) == 1 else f' {len(lives)} times'}: {reason}"
            return due

    def cordon_of(self, member: Member) -> Cordon | None:
        """Returns the cordon of the node of ``member``, by the pod's name or that of its machine."""
        with self._lock:
            return self.held.get(member.name) or self.held.get(str(member.facts.get("machine", "")))

    def note(self, present: Collection[Member], in_use: Collection[str]) -> None:
        """Notes the states of the nodes of the members ``present``. ``in_use``: pods with a place."""
        states: dict[str, NodeState] = {member.name: "spare" for member in present if "agent" in member.facts}
        states |= dict.fromkeys(in_use, "in use")
        held = {member.name: each for member in present if member.name in states and (each := self.cordon_of(member)) is not None}
        with self._lock:
            # One that has failed is no member any more.
            held |= {node: each for node, each in self.held.items() if node in self.states}
            states |= dict.fromkeys(self.states.keys() - states.keys(), "gone")
            states |= dict.fromkeys(held, "cordoned")
            for name, state in sorted(states.items()):
                if self.states.get(name) != state:
                    self._news.append({"node": name, "state": state, **({"reason": held[name].reason} if name in held else {})})
            self.states |= states

    def told(self) -> list[dict[str, Any]]:
        """Returns the states that have changed since the last call: each node with its state, and the reason of a cordon."""
        with self._lock:
            news, self._news = self._news, []
            return news

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
