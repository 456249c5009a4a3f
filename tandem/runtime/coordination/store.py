"""What the parts of a run agree on, as an interface: keys, revisions, compare-and-swap, leases. etcd's model, cut to
what is used: one revision counter for the whole store, raised by every change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and the store's ``revision`` at which it was written."""

    key: str
    value: bytes
    revision: int


class Conflict(Exception):
    """A compare-and-swap lost: ``found`` is the entry that stands there now (``None``: no such key)."""

    def __init__(self, key: str, expected: int | None, found: Entry | None) -> None:
        at = "absent" if found is None else f"at revision {found.revision}"
        wanted = "absent" if expected is None else f"at revision {expected}"
        super().__init__(f"key '{key}' is {at}, not {wanted}")
        self.key, self.expected, self.found = key, expected, found


class WatchTimeout(Exception):
    """A watched key did not change within its deadline."""


class Store(Protocol):
    """Every method may raise ``RunError`` where the store cannot be reached or is damaged. Methods may be called from
    any thread; changes of one process are seen by all others at once."""

    def get(self, key: str) -> Entry | None:
        """The entry now, or ``None``."""

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Write, whatever stands there; returns the revision. With ``lease`` the key goes when the lease does."""

    def compare_and_swap(self, key: str, expected_revision: int | None, value: bytes, lease: int | None = None) -> int:
        """Write only where the key is at ``expected_revision`` (``None``: absent); returns the revision. Raises
        ``Conflict``."""

    def delete(self, key: str) -> bool:
        """Whether the key was there."""

    def list(self, prefix: str) -> Sequence[Entry]:
        """Every entry whose key starts with ``prefix``, in the order of the keys."""

    def watch(self, key: str, after_revision: int, deadline_s: float) -> Entry:
        """Wait until the key's revision is above ``after_revision`` (0: until it is there). Raises ``WatchTimeout``."""

    def grant_lease(self, time_to_live_s: float) -> int:
        """A lease's id. Raises ``ValueError`` for a time that is not above 0."""

    def keep_alive(self, lease: int) -> None:
        """Start the lease's time anew. Raises ``LookupError`` where it has run out."""

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys."""

    def close(self) -> None: ...
