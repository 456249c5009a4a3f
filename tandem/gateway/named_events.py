"""Streams of named events (``/v1/responses``, ``/v1/messages``) that go on at another backend: what the client has received is left out of the repetition.

Such a stream is a sequence of events of which some are parts of a text (deltas) and the others open and close it. Another server divides the texts elsewhere
and draws other ids, and is else the same: the n-th event that is no delta is the n-th event here. ``resume`` says where that holds.
"""

import json
from collections.abc import Iterable
from typing import Any

from tandem.gateway.stream_events import Diverged

NAMED_PATHS = ("/v1/responses", "/v1/messages")
_ENDS = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
_IDS = ("id", "item_id", "call_id")
_DELTA_FIELDS = ("text", "thinking", "partial_json", "signature")
"""Of ``delta`` in an event of ``/v1/messages``."""

Event = dict[str, Any]


def is_ended(events: bytes) -> bool:
    """Returns whether the last event of a stream is among whole ``events``."""
    return any(b"event: %s\n" % name.encode() in events for name in _ENDS)


class NamedRepetition:
    """Takes what the client has ``received``, whole events, out of a repetition of its stream."""

    def __init__(self, received: bytes) -> None:
        """Raises ``Diverged`` if that is no stream of named events."""
        self._begun: list[Event] = []
        """The events that are no delta."""
        self._texts: dict[tuple[Any, ...], str] = {}
        for event in _parsed(received):
            if (part := _part(event)) is None:
                self._begun.append(event)
            else:
                self._texts[part[0]] = self._texts.get(part[0], "") + part[1]
        self._numbers = _numbers(received)
        self._count = 0
        self._repeated: dict[tuple[Any, ...], int] = {}
        self._ids: dict[str, str] = {}
        """Those that the client has, by those of the repetition."""
        self._created: Any = None

    def rest(self, events: bytes) -> bytes:
        """Returns of whole ``events`` of the repetition what the client has not received. Raises ``Diverged``."""
        return b"".join(_written(new) for event in _parsed(events) if (new := self._new(event)) is not None)

    def _new(self, event: Event) -> Event | None:
        if event["type"] == "error":
            raise Diverged(f"the other instance reports: {str(event.get('message') or event.get('error'))[:200]}")
        if (part := _part(event)) is not None:
            return self._new_part(event, *part)
        self._count += 1
        if self._count <= len(self._begun):
            before = self._begun[self._count - 1]
            if before["type"] != event["type"]:
                raise Diverged("another instance gives other events; are its weights the same?")
            self._learn(before, event)
            return None
        if any(self._repeated.get(key, 0) < len(text) for key, text in self._texts.items()):
            raise Diverged("another instance gives fewer tokens; are its weights the same?")
        return self._as_before(event)

    def _new_part(self, event: Event, key: tuple[Any, ...], text: str) -> Event | None:
        place, received = self._repeated.get(key, 0), self._texts.get(key, "")
        known = text[: max(0, len(received) - place)]
        if known != received[place : place + len(known)]:
            raise Diverged("another instance gives other tokens; are its weights the same?")
        self._repeated[key] = place + len(text)
        left = text[len(known) :]
        return self._as_before(_with_text(event, left)) if left else None

    def _learn(self, before: Any, now: Any) -> None:
        """Notes which ids of the repetition stand for which that the client has."""
        if isinstance(before, dict) and isinstance(now, dict):
            for name in before.keys() & now.keys():
                if name in _IDS and isinstance(before[name], str) and isinstance(now[name], str):
                    self._ids[now[name]] = before[name]
                elif name == "created_at":
                    self._created = before[name]
                else:
                    self._learn(before[name], now[name])
        elif isinstance(before, list) and isinstance(now, list):
            for pair in zip(before, now, strict=False):
                self._learn(*pair)

    def _as_before(self, event: Event) -> Event:
        """Returns ``event`` with the ids, the time and the numbers of the stream that the client receives."""
        new: Event = self._renamed(event)
        if "sequence_number" in new:
            new["sequence_number"] = self._numbers
            self._numbers += 1
        return new

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._renamed(each) for each in value]
        if not isinstance(value, dict):
            return value
        new = {name: self._id(each) if name in _IDS and isinstance(each, str) else self._renamed(each) for name, each in value.items()}
        return new | {"created_at": self._created} if "created_at" in new and self._created is not None else new

    def _id(self, id: str) -> str:
        """Returns the client's form of an id; the ids of a response's items contain that of the response."""
        if id in self._ids:
            return self._ids[id]
        return next((id.replace(now, before) for now, before in self._ids.items() if now in id), id)


def _parsed(events: bytes) -> Iterable[Event]:
    """Raises ``Diverged`` for data that are not named events."""
    try:
        found = [json.loads(line[5:]) for line in events.splitlines() if line.startswith(b"data:") and line[5:].strip() != b"[DONE]"]
    except ValueError:
        raise Diverged("an event of the stream is not JSON") from None
    if not all(isinstance(event, dict) and isinstance(event.get("type"), str) for event in found):
        raise Diverged("an event of the stream has no type")
    return found


def _numbers(events: bytes) -> int:
    """Returns the number of the next event."""
    return 1 + max((event["sequence_number"] for event in _parsed(events) if type(event.get("sequence_number")) is int), default=-1)


def _part(event: Event) -> tuple[tuple[Any, ...], str] | None:
    """Returns which text an event is a part of, and the part; ``None`` if it is no delta."""
    delta = event.get("delta")
    if event["type"].endswith(".delta") and isinstance(delta, str):
        return (event["type"], event.get("output_index"), event.get("content_index")), delta
    if event["type"] == "content_block_delta" and isinstance(delta, dict):
        name = next((name for name in _DELTA_FIELDS if isinstance(delta.get(name), str)), None)
        return None if name is None else ((name, event.get("index")), delta[name])
    return None


def _with_text(event: Event, text: str) -> Event:
    delta = event["delta"]
    if isinstance(delta, str):
        return event | {"delta": text}
    return event | {"delta": {name: text if name in _DELTA_FIELDS else value for name, value in delta.items()}}


def _written(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
