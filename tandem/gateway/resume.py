"""A stream whose backend or gateway died goes on at another one: what the client has received is left out of the repetition, and compared with it.

It is possible where random numbers depend on the request alone, as in Tandem's engines: the same request with the same seed and weights gives the same tokens
on any instance, in any batch. What is repeated is compared with what was sent, so that other weights end the stream instead of changing its text in the middle.
"""

import hashlib
import json
from typing import Any

from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.named_events import NAMED_PATHS, NamedRepetition
from tandem.gateway.named_position import NamedPosition
from tandem.gateway.stream_events import Diverged, bodies, is_usage, lists, set_list, texts, with_texts
from tandem.gateway.stream_position import Position
from tandem.serving.errors import invalid

REPEATABLE_PATHS = ("/v1/completions", "/v1/chat/completions")
MOST_BYTES = 2**22
"""Bytes of events that are kept of a stream; a longer one cannot be resumed."""


def can_resume(request: InferenceRequest) -> bool:
    """Returns whether the answer is a stream that can be put together from two backends."""
    return request.stream and request.path in (*REPEATABLE_PATHS, *NAMED_PATHS)


def seed_of(idempotency_key: str) -> int:
    """Returns the seed of a request with this key: the same at any gateway."""
    return int.from_bytes(hashlib.blake2b(idempotency_key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 2


def seeded(body: bytes, seed: int) -> bytes:
    """Returns the JSON object ``body``, which has at least one field and no seed, with ``seed``."""
    return body.rstrip()[:-1] + b',"seed":%d}' % seed


def repetition_of(request: InferenceRequest) -> "Repetition | NamedRepetition | None":
    """Returns what gives the events of a stream ids, and takes out what the client has by ``Last-Event-ID``; ``None`` for a request without a key. Raises
    ``ApiError`` for an id that no gateway gave, and for a path whose streams have none."""
    if not can_resume(request):
        if request.last_event_id:
            raise invalid(f"streams of {request.path} have no ids to go on from; leave the header Last-Event-ID out")
        return None
    if not request.idempotency_key:
        return None
    given = request.last_event_id
    try:
        if request.path in NAMED_PATHS:
            return NamedRepetition(NamedPosition.of_id(given) if given else NamedPosition(), has_ids=True)
        return Repetition(Position.of_id(given) if given else Position(), has_ids=True)
    except ValueError:
        raise invalid("the header Last-Event-ID is not the id of an event of such a stream; leave it out to begin anew") from None


class Delivered:
    """The events of a stream that the client has. They are kept as bytes, and parsed only if the stream breaks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether all of them were kept."""
        return self._bytes <= MOST_BYTES

    def add(self, events: bytes) -> None:
        self._bytes += len(events)
        if self.is_whole:
            self._parts.append(events)
        else:
            self._parts.clear()

    def named_repetition(self) -> NamedRepetition:
        """Returns what takes them, named events, out of the same stream from another backend. Raises ``Diverged`` if they are none."""
        sent = NamedRepetition(NamedPosition())
        sent.rest(b"".join(self._parts))
        return sent.again()

    def repetition(self) -> "Repetition":
        """Returns what takes them out of the same stream from another backend."""
        position = Position()
        for body in bodies(b"".join(self._parts))[0]:
            position.take(body)
        return Repetition(position)


class Repetition:
    """Takes what the client has ``received`` out of a repetition of its stream. ``has_ids``: what is left has ids, from which any gateway can go on."""

    def __init__(self, received: Position, *, has_ids: bool = False) -> None:
        self._received, self._has_ids = received, has_ids
        self._repeated = Position(same=received.same, weights=received.weights)

    @property
    def weights(self) -> str:
        """The version of the weights of the stream, empty before it is known."""
        return self._repeated.weights

    @property
    def position(self) -> Position:
        """How far the client has received the stream by now."""
        return self._repeated.joined(self._received)

    def begin(self, weights: str) -> None:
        """Notes the version of the weights that the stream begins with."""
        self._repeated.weights = weights

    def again(self) -> "Repetition":
        """Returns what takes what the client has by now out of a further repetition."""
        return Repetition(self.position, has_ids=self._has_ids)

    def rest(self, events: bytes) -> bytes:
        """Returns of whole ``events`` of the repetition what the client has not received. Raises ``Diverged``."""
        given, is_done = bodies(events)
        parts = [self._event(new) for body in given if (new := self._new(body))]
        if is_done and any(self._repeated.choice(index).is_short_of(choice) for index, choice in self._received.choices.items()):
            raise Diverged("another instance gives fewer tokens; are its weights the same?")
        return b"".join(parts) + (b"data: [DONE]\n\n" if is_done else b"")

    def _event(self, body: dict[str, Any]) -> bytes:
        name = b"id: %s\n" % self.position.to_id().encode() if self._has_ids else b""
        return name + b"data: %s\n\n" % json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()

    def _new(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in body:
            raise Diverged(f"the other instance reports: {str(body['error'].get('message', ''))[:200]}")
        self._repeated.note(body)
        if is_usage(body):
            return None if self._received.has_usage else body | self._repeated.same
        choices = [new for choice in body.get("choices", ()) if (new := self._new_of(choice)) is not None]
        return body | self._repeated.same | {"choices": choices} if choices else None

    def _new_of(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the part of a choice that is new, ``None`` if there is none."""
        received, repeated = self._received.choice(choice["index"]), self._repeated.choice(choice["index"])
        had_begun, counts = received.has_begun or repeated.has_begun, dict(repeated.entries)
        fresh = {name: repeated.text(name).repeat(received.text(name), text) for name, text in texts(choice).items()}
        repeated.take_rest(choice)
        if received.has_ended:
            return None
        new = with_texts(choice, fresh)
        is_new = any(fresh.values()) or choice.get("finish_reason") is not None or not had_begun
        for name, values in lists(choice).items():
            left = max(0, received.entries.get(name, 0) - counts.get(name, 0))
            is_new = is_new or len(values) > left
            set_list(new, name, values[left:])
        if had_begun:
            new.pop("prompt_token_ids", None)
            if "delta" in new:
                new["delta"].pop("role", None)
        return new if is_new else None
