"""A stream whose backend died goes on at another one: what the client has received is left out of the repetition, and compared with it.

It is possible where random numbers depend on the request alone, as in Tandem's engines: the same request with the same seed and weights gives the same tokens
on any instance, in any batch. What is repeated is compared with what was sent, so that other weights end the stream instead of changing its text in the middle.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from tandem.gateway.inference_request import InferenceRequest

_PATHS = ("/v1/completions", "/v1/chat/completions")
MOST_BYTES = 2**22
"""Bytes of events that are kept of a stream; a longer one cannot be resumed."""
_DONE = b"[DONE]"
_DELTA_TEXTS = ("content", "reasoning", "reasoning_content")
_CALL_TEXTS = ("name", "arguments")


def can_resume(request: InferenceRequest) -> bool:
    """Returns whether the answer is a stream that can be put together from two backends."""
    return request.stream and request.path in _PATHS


class Diverged(Exception):
    """The repetition is not what the client has received."""


def seeded(body: bytes, seed: int) -> bytes:
    """Returns the JSON object ``body``, which has at least one field and no seed, with ``seed``."""
    return body.rstrip()[:-1] + b',"seed":%d}' % seed


@dataclass
class _Choice:
    """What was received of one choice. ``texts``: of the answer, its reasoning and its tool calls (``_texts``). ``entries``: counts of log-probabilities and
    token ids. ``has_ended``: its reason to finish was there."""

    texts: dict[str, str] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)
    has_begun: bool = False
    has_ended: bool = False

    def is_short_of(self, other: "_Choice") -> bool:
        """Returns whether ``other`` has text that this one has not."""
        return any(len(self.texts.get(name, "")) < len(text) for name, text in other.texts.items())


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

    def repetition(self) -> "Repetition":
        """Returns what takes them out of the same stream from another backend."""
        return Repetition(_bodies(b"".join(self._parts))[0])


class Repetition:
    """Takes what the client has received, the events ``received``, out of a repetition of its stream."""

    def __init__(self, received: list[dict[str, Any]]) -> None:
        self._received: dict[int, _Choice] = {}
        self._repeated: dict[int, _Choice] = {}
        self._has_usage = False
        first = received[0] if received else {}
        # Events of one answer have one id and one time.
        self._same = {name: first[name] for name in ("id", "created") if name in first}
        for body in received:
            self._has_usage = self._has_usage or _is_usage(body)
            for choice in body.get("choices", ()):
                _take(self._received.setdefault(choice["index"], _Choice()), choice)

    def rest(self, events: bytes) -> bytes:
        """Returns of whole ``events`` of the repetition what the client has not received. Raises ``Diverged``."""
        bodies, is_done = _bodies(events)
        parts = [b"data: %s\n\n" % json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() for body in map(self._new, bodies) if body]
        if is_done and any(self._repeated.get(index, _Choice()).is_short_of(choice) for index, choice in self._received.items()):
            raise Diverged("another instance gives fewer tokens; are its weights the same?")
        return b"".join(parts) + (b"data: [DONE]\n\n" if is_done else b"")

    def _new(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in body:
            raise Diverged(f"the other instance reports: {str(body['error'].get('message', ''))[:200]}")
        if _is_usage(body):
            return None if self._has_usage else body | self._same
        choices = [new for choice in body.get("choices", ()) if (new := self._new_of(choice)) is not None]
        return body | self._same | {"choices": choices} if choices else None

    def _new_of(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the part of a choice that is new, ``None`` if there is none."""
        received = self._received.setdefault(choice["index"], _Choice())
        repeated = self._repeated.setdefault(choice["index"], _Choice())
        before, counts = dict(repeated.texts), dict(repeated.entries)
        _take(repeated, choice)
        texts = {}
        for name, text in repeated.texts.items():
            sent, begin = received.texts.get(name, ""), len(before.get(name, ""))
            both = min(len(text), len(sent))
            if text[begin:both] != sent[begin:both]:
                raise Diverged("another instance gives other tokens; are its weights the same?")
            texts[name] = text[max(begin, len(sent)) :]
        if received.has_ended:
            return None
        new = _with_texts(choice, texts)
        is_new = any(texts.values()) or choice.get("finish_reason") is not None or not received.has_begun
        for name, values in _lists(choice).items():
            left = max(0, received.entries.get(name, 0) - counts.get(name, 0))
            is_new = is_new or len(values) > left
            _set_list(new, name, values[left:])
        if received.has_begun:
            new.pop("prompt_token_ids", None)
            if "delta" in new:
                new["delta"].pop("role", None)
        received.has_begun = True
        return new if is_new else None


def _bodies(events: bytes) -> tuple[list[dict[str, Any]], bool]:
    """Returns the JSON objects of whole events, and whether ``[DONE]`` is among them. Raises ``Diverged`` for an event that is no object of choices."""
    found = [line[5:].strip() for line in events.splitlines() if line.startswith(b"data:")]
    try:
        bodies = [json.loads(data) for data in found if data != _DONE]
    except ValueError:
        raise Diverged("an event of the stream is not JSON") from None
    for body in bodies:
        choices = body.get("choices", []) if isinstance(body, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) and isinstance(choice.get("index"), int) for choice in choices):
            raise Diverged("an event of the stream has no choices")
    return bodies, _DONE in found


def _is_usage(body: dict[str, Any]) -> bool:
    return not body.get("choices") and body.get("usage") is not None


def _take(seen: _Choice, choice: dict[str, Any]) -> None:
    """Adds a choice of one event to what was seen of it."""
    for name, text in _texts(choice).items():
        seen.texts[name] = seen.texts.get(name, "") + text
    for name, values in _lists(choice).items():
        seen.entries[name] = seen.entries.get(name, 0) + len(values)
    seen.has_begun = True
    seen.has_ended = seen.has_ended or choice.get("finish_reason") is not None


def _texts(choice: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of a choice by name: ``text`` or those of its delta, and for tool call N ``N.name`` and ``N.arguments``."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return {"text": choice["text"]} if isinstance(choice.get("text"), str) else {}
    texts = {name: delta[name] for name in _DELTA_TEXTS if isinstance(delta.get(name), str)}
    for call, function in _calls(delta):
        texts |= {f"{call.get('index')}.{name}": function[name] for name in _CALL_TEXTS if isinstance(function.get(name), str)}
    return texts


def _with_texts(choice: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Returns ``choice`` with what of its ``texts`` is new. A call whose name the client has, has its id too, which another server draws anew."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return choice | {"text": texts.get("text", "")}
    new = delta | {name: texts[name] for name in _DELTA_TEXTS if isinstance(delta.get(name), str)}
    if "tool_calls" in delta:
        new["tool_calls"] = [each for call, function in _calls(delta) if (each := _new_call(call, function, texts)) is not None]
        if not new["tool_calls"]:
            del new["tool_calls"]
    return choice | {"delta": new}


def _new_call(call: dict[str, Any], function: dict[str, Any], texts: dict[str, str]) -> dict[str, Any] | None:
    index = call.get("index")
    arguments = {"arguments": texts[f"{index}.arguments"]} if isinstance(function.get("arguments"), str) else {}
    if texts.get(f"{index}.name"):
        return call | {"function": function | arguments}
    return {"index": index, "function": arguments} if arguments.get("arguments") else None


def _calls(delta: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the tool calls of a delta, each with its function."""
    found = delta.get("tool_calls")
    calls = [call for call in found if isinstance(call, dict)] if isinstance(found, list) else []
    return [(call, call["function"]) for call in calls if isinstance(call.get("function"), dict)]


def _lists(choice: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the lists of a choice that have an entry for each token, by name."""
    logprobs = choice.get("logprobs")
    inside = {f"logprobs.{name}": values for name, values in logprobs.items() if isinstance(values, list)} if isinstance(logprobs, dict) else {}
    return inside | ({"token_ids": choice["token_ids"]} if isinstance(choice.get("token_ids"), list) else {})


def _set_list(choice: dict[str, Any], name: str, values: list[Any]) -> None:
    if name == "token_ids":
        choice["token_ids"] = values
    else:
        choice["logprobs"] = choice["logprobs"] | {name.removeprefix("logprobs."): values}
