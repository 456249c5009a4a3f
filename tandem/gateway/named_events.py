"""Streams of named events (``/v1/responses``, ``/v1/messages``) that go on at another backend: what the client has received is left out of the repetition.

Such a stream is a sequence of events of which some are parts of a text (deltas) and the others open and close it. Another server divides the texts elsewhere
and draws other ids, and is else the same: the n-th event that is no delta is the n-th event here. ``resume`` says where that holds.
"""

import json
from collections.abc import Iterable
from typing import Any

from tandem.gateway.named_position import NamedPosition, created_in, ids_in, kinds_digest, name_of, renamed
from tandem.gateway.stream_events import Diverged
from tandem.gateway.stream_position import ReceivedText

NAMED_PATHS = ("/v1/responses", "/v1/messages")
_ENDS = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
_DELTA_FIELDS = ("text", "thinking", "partial_json", "signature")
"""Of ``delta`` in an event of ``/v1/messages``."""

_NOTHING = ReceivedText()

Event = dict[str, Any]


def is_ended(events: bytes) -> bool:
    """Returns whether the last event of a stream is among whole ``events``."""
    return any(b"event: %s\n" % name.encode() in events for name in _ENDS)


class NamedRepetition:
    """Takes what the client has ``received`` out of a repetition of its stream. ``has_ids``: what is left has ids, from which any gateway can go on."""

    def __init__(self, received: NamedPosition, *, has_ids: bool = False) -> None:
        self._received, self._has_ids = received, has_ids
        self._count, self._kinds = 0, kinds_digest()
        self._texts: dict[str, ReceivedText] = {}
        self._names: dict[str, str] = {}
        """The ids that the client has, by those of the repetition."""
        self._number, self._created, self._weights = received.number, received.created, received.weights

    @property
    def weights(self) -> str:
        """The version of the weights of the stream, empty before it is known."""
        return self._weights

    @property
    def position(self) -> NamedPosition:
        """How far the client has received the stream by now."""
        before = self._received
        texts = {**before.texts, **{name: text for name, text in self._texts.items() if text.length >= before.texts.get(name, _NOTHING).length}}
        count, kinds = (self._count, str(self._kinds.hexdigest())) if self._count >= before.count else (before.count, before.kinds)
        ids = tuple(self._names.values()) if len(self._names) >= len(before.ids) else before.ids
        return NamedPosition(count, kinds, ids, texts, self._number, self._created, self._weights)

    def begin(self, weights: str) -> None:
        """Notes the version of the weights that the stream begins with."""
        self._weights = weights

    def again(self) -> "NamedRepetition":
        """Returns what takes what the client has by now out of a further repetition."""
        return NamedRepetition(self.position, has_ids=self._has_ids)

    def rest(self, events: bytes) -> bytes:
        """Returns of whole ``events`` of the repetition what the client has not received. Raises ``Diverged``."""
        return b"".join(self._event(new) for event in _parsed(events) if (new := self._new(event)) is not None)

    def _event(self, event: Event) -> bytes:
        name = b"id: %s\n" % self.position.to_id().encode() if self._has_ids else b""
        return name + b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())

    def _new(self, event: Event) -> Event | None:
        if event["type"] == "error":
            raise Diverged(f"the other instance reports: {str(event.get('message') or event.get('error'))[:200]}")
        if (part := _part(event)) is not None:
            return self._new_part(event, *part)
        self._count += 1
        self._kinds.update(event["type"].encode() + b"\n")
        if self._count > self._received.count:
            if any(self._texts.get(name, _NOTHING).length < text.length for name, text in self._received.texts.items()):
                raise Diverged("another instance gives fewer tokens; are its weights the same?")
            return self._as_before(event)
        known = self._received.ids
        for id in ids_in(event):
            if id not in self._names and len(self._names) < len(known):
                self._names[id] = known[len(self._names)]
        if self._count == self._received.count and (len(self._names) < len(known) or self._kinds.hexdigest() != self._received.kinds):
            raise Diverged("another instance gives other events; are its weights the same?")
        return None

    def _new_part(self, event: Event, name: str, text: str) -> Event | None:
        left = self._texts.setdefault(name, ReceivedText()).repeat(self._received.texts.get(name, _NOTHING), text)
        if not left:
            return None
        if self._count < self._received.count:
            raise Diverged("another instance gives more tokens; are its weights the same?")
        return self._as_before(_with_text(event, left))

    def _as_before(self, event: Event) -> Event:
        """Returns ``event`` with the ids, the time and the numbers of the stream that the client receives."""
        self._created = created_in(event) if self._created is None else self._created
        for id in ids_in(event):
            self._names.setdefault(id, name_of(id, self._names))
        new: Event = renamed(event, self._names, self._created)
        if type(event.get("sequence_number")) is int:
            new["sequence_number"] = self._number
            self._number += 1
        return new


def _parsed(events: bytes) -> Iterable[Event]:
    """Raises ``Diverged`` for data that are not named events."""
    try:
        found = [json.loads(line[5:]) for line in events.splitlines() if line.startswith(b"data:") and line[5:].strip() != b"[DONE]"]
    except ValueError:
        raise Diverged("an event of the stream is not JSON") from None
    if not all(isinstance(event, dict) and isinstance(event.get("type"), str) for event in found):
        raise Diverged("an event of the stream has no type")
    return found


def _part(event: Event) -> tuple[str, str] | None:
    """Returns the name of the text that an event is a part of, and the part; ``None`` if it is no delta."""
    delta = event.get("delta")
    if event["type"].endswith(".delta") and isinstance(delta, str):
        return f"{event['type']} {event.get('output_index')} {event.get('content_index')}", delta
    if event["type"] == "content_block_delta" and isinstance(delta, dict):
        name = next((name for name in _DELTA_FIELDS if isinstance(delta.get(name), str)), None)
        return None if name is None else (f"{name} {event.get('index')}", delta[name])
    return None


def _with_text(event: Event, text: str) -> Event:
    delta = event["delta"]
    if isinstance(delta, str):
        return event | {"delta": text}
    return event | {"delta": {name: text if name in _DELTA_FIELDS else value for name, value in delta.items()}}
