"""A call written in JSON, whose arguments are passed on while they are written."""

import json
import re
from collections.abc import Iterator

from tandem.text.answer_events import CallArguments, CallBegun, CallEnded, Event, Unreadable
from tandem.text.nesting import Nesting
from tandem.text.pieces import Pieces, Steps
from tandem.text.written_calls import from_json

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OBJECT = re.compile(r"\s*(?=\{)")
_LONGEST_HEAD = 1024
"""Characters within which the arguments of a call begin that are passed on while they are written. Those of any other call are passed on at its end."""


class JsonCall:
    """Reads ``{"name": NAME, "arguments": {...}}`` (or ``parameters``) or, with a ``name``, the object of its arguments alone. ``id``: of the call."""

    def __init__(self, name: str = "", id: str = "") -> None:
        self._name, self._id = name, id
        self._has_name = bool(name)
        self._written: list[str] = []
        self._head: str | None = ""
        """What was written before the arguments, ``None`` behind them or where none are expected any more."""
        self._arguments: Nesting | None = None

    def push(self, text: str) -> Iterator[Event]:
        """Yields what ``text`` adds."""
        if self._arguments is None or not self._has_name:
            self._written.append(text)
        if self._head is not None:
            self._head += text
            match = (_OBJECT if self._has_name else _HEAD).match(self._head)
            if match is not None:
                text, self._head = self._head[match.end() :], None
                yield from self._begin(match)
            elif len(self._head) > _LONGEST_HEAD:
                self._head = None
        if self._arguments is not None and not self._arguments.is_over:
            part = text[: self._arguments.take(text)]
            if self._has_name:
                self._written.append(part)
            if part:
                yield CallArguments(part)

    def _begin(self, match: re.Match[str]) -> Iterator[Event]:
        if self._has_name:
            self._written.clear()
        else:
            try:
                self._name = json.loads(match[1])
            except ValueError:
                return
        self._arguments = Nesting()
        yield CallBegun(self._name, self._id)

    def finish(self) -> Iterator[Event]:
        """Yields the end of the call, after the whole of one that could not be passed on before."""
        written = "".join(self._written)
        call = from_json(written, self._name if self._has_name else "")
        if self._arguments is None and not call.problem:
            yield CallBegun(call.name, self._id or call.id)
            yield CallArguments(json.dumps(dict(call.arguments), ensure_ascii=False))
        yield Unreadable(written, call) if self._arguments is None and call.problem else CallEnded(call)


def json_object(source: Pieces, call: JsonCall | None = None) -> Steps[None]:
    """Reads a call to the end of its object."""
    call, nesting = call or JsonCall(), Nesting()
    while True:
        yield from call.push(source.drop(nesting.take(source.text)))
        if nesting.is_over or source.is_over:
            break
        yield None
    yield from shown(call.finish())


def shown(events: Iterator[Event], start: str = "", end: str = "") -> Iterator[Event]:
    """Passes ``events`` on, with the marks around a call that cannot be read."""
    for event in events:
        yield event._replace(written=f"{start}{event.written}{end}") if isinstance(event, Unreadable) else event
