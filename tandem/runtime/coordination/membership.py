"""The members of a run: a key for each under ``members/``, on the lease of its process, so that one that dies is gone when its lease ends."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Conflict, Entry, Store
from tandem.types.errors import RunError

_MEMBERS = "members/"
ENDED = "ended"
"""The key of a run that has released its members. One that was between two lives then was not told."""
_ENDED_S = 120.0


@dataclass(frozen=True, slots=True)
class Member:
    """``facts``: what it told when it joined, in plain values. ``revision``: of its joining, which tells two lives of one name apart."""

    name: str
    facts: Mapping[str, Any]
    revision: int


def join(session: Session, name: str, facts: Mapping[str, Any]) -> Member:
    """Makes this process the member ``name``. Raises ``RunError`` if there is one of this name."""
    try:
        revision = session.store.compare_and_swap(_MEMBERS + name, None, json.dumps(facts).encode(), session.lease)
    except Conflict as conflict:
        told = conflict.found.value.decode("utf-8", "replace") if conflict.found is not None else "gone since"
        raise RunError(f"the run has a member '{name}' already ({told}); give this one another name, or end that one") from None
    return Member(name, facts, revision)


def leave(store: Store, name: str) -> None:
    """Removes the member, if it is there."""
    store.delete(_MEMBERS + name)


def release_all(store: Store) -> None:
    """Says for two minutes, longer than a member takes to join again, that the run needs no member any more."""
    store.put(ENDED, b"", store.grant_lease(_ENDED_S))


def members(store: Store) -> Sequence[Member]:
    """Returns the members, by name."""
    return _decoded(store.list(_MEMBERS))


def find_member(store: Store, name: str) -> Member | None:
    """Returns the member ``name``, ``None`` if there is none. What each of many members asks again and again must not read the keys of all."""
    entry = store.get(_MEMBERS + name)
    return None if entry is None else _member(entry)


def watch_members(store: Store, known: Sequence[Member], deadline_s: float) -> Sequence[Member]:
    """Waits until the members are not ``known``, and returns them. Raises ``WatchTimeout``."""
    before = [Entry(_MEMBERS + member.name, json.dumps(member.facts).encode(), member.revision) for member in known]
    return _decoded(store.watch_prefix(_MEMBERS, before, deadline_s))


def _decoded(entries: Sequence[Entry]) -> Sequence[Member]:
    return [_member(entry) for entry in entries]


def _member(entry: Entry) -> Member:
    return Member(entry.key.removeprefix(_MEMBERS), json.loads(entry.value), entry.revision)
