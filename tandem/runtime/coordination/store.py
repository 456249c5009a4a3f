"""The interface of the store that the processes of a run share: keys, revisions, compare-and-swap, watches, leases. A subset of etcd's model, with
one revision counter for the whole store, which every change increments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and the store's ``revision`` at which it was written."""

    key: str
    value: bytes
    revision: int


class Conflict(Exception):
    """A compare-and-swap failed. ``found`` is the current entry (``None``: the key does not exist)."""

    def __init__(self, key: str, expected: int | None, found: Entry | None) -> None:
        at = "absent" if found is None else f"at revision {found.revision}"
        wanted = "absent" if expected is None else f"at revision {expected}"
        super().__init__(f"key '{key}' is {at}, not {wanted}")
        self.key, self.expected, self.found = key, expected, found


class Guard(NamedTuple):
    """A condition of a write: ``key`` is at ``revision``. A leader guards its writes with the key that it leads by, whose revision is its fencing
    token."""

    key: str
    revision: int


class Fenced(Exception):
    """A guarded write was refused. ``found``: the entry of the guard's key now (``None``: it does not exist)."""

    def __init__(self, guard: Guard, found: Entry | None) -> None:
        at = "absent" if found is None else f"at revision {found.revision}"
        super().__init__(f"the write was fenced: its guard '{guard.key}' is {at}, not at revision {guard.revision}")
        self.guard, self.found = guard, found


class WatchTimeout(Exception):
    """A watched key did not change within its deadline."""


class Store(Protocol):
    """A key-value store. Every method raises ``RunError`` where the store cannot be reached or is damaged. Thread-safe; changes of one process
    are visible to all others at once."""

    def get(self, key: str) -> Entry | None:
        """Returns the current entry, or ``None``."""

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes the key unconditionally and returns its revision. With ``lease`` the key is deleted when the lease ends."""

    def compare_and_swap(self, key: str, expected_revision: int | None, value: bytes, lease: int | None = None, guard: Guard | None = None) -> int:
        """Writes the key if it is at ``expected_revision`` (``None``: absent) and returns its revision. Raises ``Conflict`` otherwise, and ``Fenced``
        if the ``guard`` does not hold in the same transaction."""

    def delete(self, key: str) -> bool:
        """Deletes the key. Returns whether it existed."""

    def list(self, prefix: str) -> Sequence[Entry]:
        """Returns every entry whose key starts with ``prefix``, by key."""

    def watch(self, key: str, after_revision: int, deadline_s: float) -> Entry:
        """Waits until the key's revision is above ``after_revision`` (0: until it exists). Raises ``WatchTimeout``."""

    def watch_prefix(self, prefix: str, known: Sequence[Entry], deadline_s: float) -> Sequence[Entry]:
        """Waits until ``list(prefix)`` is not ``known``, and returns it. Raises ``WatchTimeout``."""

    def grant_lease(self, time_to_live_s: float) -> int:
        """Makes a lease and returns its id. A store may count in whole seconds, and rounds up. Raises ``ValueError`` for a time that is not above 0."""

    def keep_alive(self, lease: int) -> None:
        """Renews the lease. Raises ``LookupError`` where it has expired."""

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes its keys."""

    def close(self) -> None: ...
