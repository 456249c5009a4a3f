"""The controller's claim to its run in etcd: one that does not lead does not begin, and what a deposed one publishes is refused.

The embedded store needs none of it: its file lies in the run's folder, which the run's lock gives to one process.
"""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.coordination import CoordinationConfig
from tandem.pod.near_tiers import KEEPERS
from tandem.runtime.coordination.election import LEADER, NotElected, campaign
from tandem.runtime.coordination.embedded import boot_id
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.membership import release_all
from tandem.runtime.coordination.open import run_prefix
from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Entry, Guard
from tandem.runtime.records.journal import Journal
from tandem.trainer.corruption.finding import SilentCorruption
from tandem.types import RunError, UserError

_KEY = "coordination"
"""The journal's key of the run's id in etcd, and of its cluster."""
_FIRST_CONTACT_S = 10.0
_LEASE_LAG_S = 5.0
"""How much longer than its time to live a lease may last."""

Fence = Callable[[], Guard | None]
"""Returns the guard of what the run publishes, ``None`` for a store without one. Raises ``RunError`` if another controller leads."""


def led_revision(fence: Fence) -> int:
    """Returns the revision by which pods that join know the controller that leads. Raises ``RunError`` if another one does."""
    guard = fence()
    assert guard is not None, "pods join through etcd, where a controller leads"
    return guard.revision


def check_coordination(config: CoordinationConfig, name: str) -> None:
    """Raises ``UserError`` or ``RunError`` where etcd does not answer, does not let the user in, or another controller leads the run ``name``."""
    if config.store == "embedded":
        return
    store = EtcdStore(replace(config, deadline_s=min(config.deadline_s, _FIRST_CONTACT_S)), run_prefix(config, Path(name)))
    try:
        store.get(LEADER)
    finally:
        store.close()


@contextlib.contextmanager
def leading(
    config: CoordinationConfig, directory: Path, journal: Journal, tell: Callable[[str], None], *, pods_join: bool = False
) -> Iterator[Fence]:
    """Leads the run in ``directory``, whose lock this process holds, until the end of the block, which removes the run's keys. ``tell``: of messages for the
    user. ``pods_join``: pods are started elsewhere, and those between two lives are told of the end unless the run begins again. Raises ``UserError`` if
    another controller leads, or if this is not the run's cluster."""
    if config.store == "embedded":
        yield lambda: None
        return
    check_coordination(config, directory.name)
    leadership, ends = _Leadership(config, directory, journal, tell), pods_join
    try:
        leadership.begin()
        yield leadership.guard
    except SilentCorruption:
        ends = False
        raise
    finally:
        leadership.close(ends)


class _Leadership:
    def __init__(self, config: CoordinationConfig, directory: Path, journal: Journal, tell: Callable[[str], None]) -> None:
        self._config, self._directory, self._tell = config, directory, tell
        self._store = EtcdStore(config, run_prefix(config, directory))
        self._place = {"host": socket.gethostname(), "boot": boot_id(), "directory": str(directory.resolve())}
        self._run = _run_id(self._store, journal)
        self._session: Session | None = None
        self._guard: Guard | None = None

    def begin(self) -> None:
        """Leads, and removes what an earlier controller of the run left: its processes are dead."""
        self._campaign()
        # Keepers outlive a controller, and may have the run's newest checkpoints.
        self._clear(but=KEEPERS)

    def guard(self) -> Guard:
        """Returns the guard; a lease that expired while nobody else took over is begun anew."""
        assert self._guard is not None
        entry = self._store.get(LEADER)
        if entry is None or entry.revision != self._guard.revision:
            self._tell("this controller's lease in etcd expired; it leads the run again if no other does")
            try:
                self._campaign()
            except UserError as error:
                raise RunError(str(error)) from None
        return self._guard

    def close(self, ends: bool) -> None:
        """Removes the run's keys if this process leads; ``ends``: and tells pods that join again that the run has ended. Waits little for an etcd that does
        not answer, where leases end by themselves."""
        if self._session is None:
            self._store.close()
            return
        self._store.config = replace(self._config, deadline_s=min(self._config.deadline_s, _LEASE_LAG_S))
        with contextlib.suppress(UserError):
            if self._guard is not None and (entry := self._store.get(LEADER)) is not None and entry.revision == self._guard.revision:
                self._clear()
                if ends:
                    release_all(self._store)
                self._store.forget_requests()
        self._session.close()
        self._store.close()

    def _clear(self, but: str = LEADER) -> None:
        for entry in self._store.list(""):
            if entry.key != LEADER and not entry.key.startswith(but):
                self._store.delete(entry.key)

    def _campaign(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = session = Session(self._store, self._config.lease_s)
        value = json.dumps({"run": self._run, **self._place, "pid": os.getpid(), "lease": session.lease})
        try:
            self._guard = campaign(session, value.encode(), self._config.lease_s + _LEASE_LAG_S, self._met)
        except NotElected as error:
            who = _facts(error.leader)
            raise UserError(
                f"another controller leads run '{self._directory.name}' in etcd: process {who['pid']} on {who['host']}, with {who['directory']}; end it, or "
                "wait for it"
            ) from None

    def _met(self, leader: Entry) -> None:
        """Ends the lease of a controller that is dead for certain; waits for another's."""
        who = _facts(leader)
        if who["run"] != self._run:
            raise UserError(
                f"the keys under {self._store.prefix} in etcd are those of another run, which process {who['pid']} on {who['host']} leads with "
                f"{who['directory']}; choose another run.name or coordination.prefix"
            )
        if all(who[name] == value for name, value in self._place.items()):
            # This process holds the lock of that folder on that machine.
            self._store.revoke(int(who["lease"]))
        else:
            self._tell(f"waiting for the lease of the controller on {who['host']} (process {who['pid']}), up to {self._config.lease_s:g} s")


def _facts(leader: Entry) -> dict[str, Any]:
    unknown = {"run": "", "host": "an unknown machine", "boot": "", "directory": "an unknown folder", "pid": "unknown", "lease": 0}
    try:
        told = json.loads(leader.value)
    except ValueError:
        return unknown
    return {**unknown, **told} if isinstance(told, dict) else unknown


def _run_id(store: EtcdStore, journal: Journal) -> str:
    """Returns the id of the run, which its journal has. Raises ``UserError`` if ``store`` is in another cluster than the run began in."""
    saved, cluster, config = journal.get(_KEY), store.cluster_id, store.config
    if saved is None:
        saved = {"run": secrets.token_hex(8), "cluster": cluster}
        journal.set(_KEY, saved)
    if saved["cluster"] != cluster:
        if config.cluster_id != cluster:
            raise UserError(
                f"etcd at {', '.join(config.endpoints)} is cluster {cluster}, and the run began in cluster {saved['cluster']}, where its controller may still "
                f"work; correct coordination.endpoints, or if that cluster is gone, resume with --coordination.cluster_id={cluster}"
            )
        journal.set(_KEY, {**saved, "cluster": cluster})
    return str(saved["run"])
