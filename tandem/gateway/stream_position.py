"""How far a stream was received: what can be compared with a repetition, and written as the id of an event."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tandem.gateway.stream_events import Diverged, is_usage, lists, texts

DIGEST_BYTES = 8


@dataclass
class ReceivedText:
    """One text of a choice. ``_known``: the digest of a text that is not known itself."""

    length: int = 0
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    _known: str | None = None

    @classmethod
    def known(cls, length: int, digest: str) -> "ReceivedText":
        return cls(length, _known=digest)

    @property
    def digest(self) -> str:
        return self._known or str(self._hash.hexdigest())

    def add(self, text: str) -> None:
        self.length += len(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def repeat(self, sent: "ReceivedText", text: str) -> str:
        """Adds ``text`` of a repetition of what was ``sent``; returns the part that is new. Raises ``Diverged`` where what was sent ends, if that was another
        text."""
        known = max(0, sent.length - self.length)
        self.add(text[:known])
        if known and self.length == sent.length and self.digest != sent.digest:
            raise Diverged("another instance gives other tokens; are its weights the same?")
        self.add(text[known:])
        return text[known:]


@dataclass
class ReceivedChoice:
    """What was received of one choice. ``texts``: of the answer, its reasoning and its tool calls. ``entries``: counts of log-probabilities and token ids.
    ``has_ended``: its reason to finish was there."""

    texts: dict[str, ReceivedText] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)
    has_begun: bool = False
    has_ended: bool = False

    def text(self, name: str) -> ReceivedText:
        return self.texts.setdefault(name, ReceivedText())

    def take(self, choice: dict[str, Any]) -> None:
        """Adds a choice of one event."""
        for name, text in texts(choice).items():
            self.text(name).add(text)
        self.take_rest(choice)

    def take_rest(self, choice: dict[str, Any]) -> None:
        """Adds all of a choice but its texts."""
        for name, values in lists(choice).items():
            self.entries[name] = self.entries.get(name, 0) + len(values)
        self.has_begun = True
        self.has_ended = self.has_ended or choice.get("finish_reason") is not None

    def is_short_of(self, other: "ReceivedChoice") -> bool:
        """Returns whether ``other`` has text that this one has not."""
        return any(self.text(name).length < text.length for name, text in other.texts.items())

    def joined(self, other: "ReceivedChoice") -> "ReceivedChoice":
        """Returns what was received of a choice of which this and ``other``, another beginning of the same, were received."""
        longest = {name: max(self.text(name), other.text(name), key=lambda text: text.length) for name in {**self.texts, **other.texts}}
        entries = {name: max(self.entries.get(name, 0), other.entries.get(name, 0)) for name in {**self.entries, **other.entries}}
        return ReceivedChoice(longest, entries, self.has_begun or other.has_begun, self.has_ended or other.has_ended)


@dataclass
class Position:
    """How far a stream was received. ``same``: what all its events have in common (``id``, ``created``). ``weights``: the version of the weights that it began
    with."""

    choices: dict[int, ReceivedChoice] = field(default_factory=dict)
    has_usage: bool = False
    same: dict[str, Any] = field(default_factory=dict)
    weights: str = ""

    def choice(self, index: int) -> ReceivedChoice:
        return self.choices.setdefault(index, ReceivedChoice())

    def note(self, body: dict[str, Any]) -> None:
        """Notes what an event has in common with all others."""
        self.same = self.same or {name: body[name] for name in ("id", "created") if name in body}
        self.has_usage = self.has_usage or is_usage(body)

    def take(self, body: dict[str, Any]) -> None:
        """Adds an event."""
        self.note(body)
        for choice in body.get("choices", ()):
            self.choice(choice["index"]).take(choice)

    def joined(self, other: "Position") -> "Position":
        """Returns the position of a client that has received this and ``other``, another beginning of the same stream."""
        choices = {index: self.choice(index).joined(other.choice(index)) for index in {**self.choices, **other.choices}}
        return Position(choices, self.has_usage or other.has_usage, self.same or other.same, self.weights or other.weights)

    def to_id(self) -> str:
        """Returns the position as the id of an event, from which any gateway can go on (``Last-Event-ID``)."""
        choices = [
            [index, {name: [text.length, text.digest] for name, text in one.texts.items()}, one.entries, one.has_begun, one.has_ended]
            for index, one in self.choices.items()
        ]  # fmt: skip
        content = json.dumps([self.weights, choices, self.has_usage, self.same], separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode()

    @classmethod
    def of_id(cls, given: bytes) -> "Position":
        """Returns the position that ``to_id`` gave. Raises ``ValueError`` for anything else."""
        try:
            weights, listed, has_usage, same = json.loads(base64.urlsafe_b64decode(given))
            choices = {count_of(index): _choice_of(*rest) for index, *rest in listed}
            return cls(choices, bool(has_usage), dict(same), str(weights))
        except (TypeError, AttributeError, RecursionError, UnicodeError) as error:
            raise ValueError(str(error)) from None


def _choice_of(given: dict[str, Any], entries: dict[str, Any], has_begun: Any, has_ended: Any) -> ReceivedChoice:
    known = {str(name): ReceivedText.known(count_of(length), str(digest)) for name, (length, digest) in given.items()}
    return ReceivedChoice(known, {str(name): count_of(count) for name, count in entries.items()}, bool(has_begun), bool(has_ended))


def count_of(given: Any) -> int:
    """Raises ``ValueError`` for what is no count."""
    if type(given) is not int or given < 0:
        raise ValueError(f"{given!r} is no count")
    return given
