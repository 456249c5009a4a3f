"""How far a stream of named events was received: what can be compared with a repetition, and written as the id of an event."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.gateway.stream_position import DIGEST_BYTES, ReceivedText, count_of

_IDS = ("id", "item_id", "call_id")


@dataclass(frozen=True, slots=True)
class NamedPosition:
    """How far a stream was received.

    Args:
        count: the events that are no part of a text. ``kinds``: a digest of their types, in order.
        ids: the ids in them, each once, in the order in which they came first.
        texts: what was received of each text.
        number: the number of the next event.
        created: when the answer was created, as its first event says; ``None`` if that does not say it.
        weights: the version of the weights that the stream began with.
    """

    count: int = 0
    kinds: str = ""
    ids: tuple[str, ...] = ()
    texts: dict[str, ReceivedText] = field(default_factory=dict)
    number: int = 0
    created: Any = None
    weights: str = ""

    def to_id(self) -> str:
        """Returns the position as the id of an event, from which any gateway can go on (``Last-Event-ID``)."""
        texts = {name: [text.length, text.digest] for name, text in self.texts.items()}
        content = json.dumps([self.weights, self.count, self.kinds, self.ids, texts, self.number, self.created], separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode()

    @classmethod
    def of_id(cls, given: bytes) -> "NamedPosition":
        """Returns the position that ``to_id`` gave. Raises ``ValueError`` for anything else."""
        try:
            weights, count, kinds, ids, texts, number, created = json.loads(base64.urlsafe_b64decode(given))
            known = {str(name): ReceivedText.known(count_of(length), str(digest)) for name, (length, digest) in texts.items()}
            return cls(count_of(count), str(kinds), tuple(map(str, ids)), known, count_of(number), created, str(weights))
        except (TypeError, AttributeError, RecursionError, UnicodeError) as error:
            raise ValueError(str(error)) from None


def kinds_digest() -> Any:
    """Returns the hash of the types of events."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def ids_in(value: Any) -> Iterator[str]:
    """Yields the ids in an event, in an order that depends on its structure alone."""
    if isinstance(value, list):
        for each in value:
            yield from ids_in(each)
    elif isinstance(value, dict):
        for name in sorted(value):
            if name in _IDS and isinstance(value[name], str):
                yield value[name]
            else:
                yield from ids_in(value[name])


def renamed(value: Any, names: dict[str, str], created: Any) -> Any:
    """Returns ``value`` with other ids, and the time ``created`` where it has one. The ids of a response's items contain that of the response."""
    if isinstance(value, list):
        return [renamed(each, names, created) for each in value]
    if not isinstance(value, dict):
        return value
    new = {name: name_of(each, names) if name in _IDS and isinstance(each, str) else renamed(each, names, created) for name, each in value.items()}
    return new | {"created_at": created} if "created_at" in new and created is not None else new


def name_of(id: str, names: dict[str, str]) -> str:
    """Returns the client's form of ``id``; ``names`` has those that it knows."""
    if id in names:
        return names[id]
    return next((id.replace(now, before) for now, before in names.items() if now and now in id), id)


def created_in(value: Any) -> Any:
    """Returns the first ``created_at`` in an event, ``None`` if there is none."""
    if not isinstance(value, dict):
        return None
    return value["created_at"] if "created_at" in value else next((found for each in value.values() if (found := created_in(each)) is not None), None)
