"""A barrier of named members, with a deadline that names who is missing."""

import contextlib
import time
from collections.abc import Collection

from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Conflict, Store, WatchTimeout
from tandem.types.errors import RunError

_BARRIERS = "barriers/"
_WAITING, _READY = "/waiting/", "/ready"


def wait_at_barrier(session: Session, name: str, member: str, expected: Collection[str], deadline_s: float) -> None:
    """Returns when each of ``expected``, of which ``member`` is one, has arrived at the barrier ``name``, which is passed once. A member that dies before
    all have arrived is missing again. Raises ``RunError`` past the deadline."""
    store, place, ends = session.store, _BARRIERS + name, time.monotonic() + deadline_s
    store.put(place + _WAITING + member, b"", session.lease)
    while True:
        # Those who passed first may be gone by now: what they leave is this key.
        entries = store.list(place + "/")
        if any(entry.key == place + _READY for entry in entries):
            return
        arrived = {entry.key.removeprefix(place + _WAITING) for entry in entries}
        missing = sorted(set(expected) - arrived)
        if not missing:
            with contextlib.suppress(Conflict):
                store.compare_and_swap(place + _READY, None, b"")
            return
        try:
            store.watch_prefix(place + "/", entries, max(0.0, ends - time.monotonic()))
        except WatchTimeout:
            waited = f"{len(arrived)} of {len(expected)} arrived within {deadline_s:g} s"
            raise RunError(f"barrier '{name}': {waited}; missing: {', '.join(missing)}") from None


def remove_barrier(store: Store, name: str) -> None:
    """Deletes the keys of a barrier that all have passed, so that a run with many steps does not collect them."""
    for entry in store.list(f"{_BARRIERS}{name}/"):
        store.delete(entry.key)
