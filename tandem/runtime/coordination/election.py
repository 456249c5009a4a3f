"""Which process leads, as the Election of etcd's concurrency package: the one whose leased key is there. The key's revision is the fencing token."""

import time
from collections.abc import Callable

from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Conflict, Entry, Guard, Store, WatchTimeout

LEADER = "leader"


class NotElected(Exception):
    """Another process leads. ``leader``: its entry."""

    def __init__(self, leader: Entry) -> None:
        super().__init__(f"'{leader.value.decode('utf-8', 'replace')}' leads")
        self.leader = leader


def campaign(session: Session, value: bytes, deadline_s: float, on_other: Callable[[Entry], None] = lambda leader: None) -> Guard:
    """Waits until this process leads, and returns the guard of its writes, which a store refuses (``Fenced``) once another leads. ``value`` says who it is;
    ``on_other`` is told of each other leader. Raises ``NotElected`` if another one still leads after ``deadline_s``."""
    store, ends = session.store, time.monotonic() + deadline_s
    while True:
        try:
            return Guard(LEADER, store.compare_and_swap(LEADER, None, value, session.lease))
        except Conflict as conflict:
            if conflict.found is None:
                continue
            other = conflict.found
        on_other(other)
        try:
            store.watch_prefix(LEADER, [other], max(0.0, ends - time.monotonic()))
        except WatchTimeout:
            raise NotElected(other) from None


def leader(store: Store) -> Entry | None:
    """Returns the entry of the process that leads."""
    return store.get(LEADER)
