"""Text that comes in pieces, for readers that are written as generators: such a reader yields events, and ``None`` where it needs more text."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from tandem.text.answer_events import Content, Event, Reasoning
from tandem.text.nesting import Nesting
from tandem.text.stop import overlap

T = TypeVar("T")
Steps = Generator[Event | None, None, T]


class Pieces:
    """``text``: what was written and not read yet. ``is_over``: nothing follows it. Every character is looked at a bounded number of times, however the
    text is cut."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False

    def drop(self, count: int) -> str:
        """Returns the next ``count`` characters, which are read then."""
        read, self.text = self.text[:count], self.text[count:]
        return read

    def _before(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Returns the text before the first of ``marks`` and that mark, both read; without a mark, the text that can belong to none, and ''."""
        ats = [(at, -len(mark), mark) for mark in marks if (at := self.text.find(mark)) >= 0]
        if ats:
            at, _, mark = min(ats)
            before = self.drop(at)
            self.drop(len(mark))
            return before, mark
        kept = 0 if self.is_over else max((overlap(self.text, mark) for mark in marks), default=0)
        return self.drop(len(self.text) - kept), ""

    def feed_until(self, take: Callable[[str], Iterable[Event]], *marks: str) -> Steps[str]:
        """Gives the text before the first of ``marks`` to ``take``, whose events are passed on. Returns the mark, '' at the end of the text."""
        while True:
            before, mark = self._before(marks)
            if before:
                yield from take(before)
            if mark or self.is_over:
                return mark
            yield None

    def until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Returns the text before the first of ``marks``, and the mark, '' at the end of the text."""
        parts: list[str] = []

        def keep(part: str) -> tuple[()]:
            parts.append(part)
            return ()

        mark = yield from self.feed_until(keep, *marks)
        return "".join(parts), mark

    def pass_until(self, *marks: str, kind: type[Content | Reasoning] = Content, is_trimmed: bool = False) -> Steps[str]:
        """Passes text on as events of ``kind``, without the white space before one of ``marks``. Returns the mark, '' at the end of the text.
        ``is_trimmed``: white space at the beginning and at the end of the text is left out too."""
        spaces: list[str] = []
        has_begun = not is_trimmed

        def keep(part: str) -> Iterable[Event]:
            nonlocal has_begun
            if not has_begun:
                part = part.lstrip()
                has_begun = bool(part)
            shown = part.rstrip()
            if shown:
                yield kind("".join((*spaces, shown)))
                spaces.clear()
            if len(shown) < len(part):
                spaces.append(part[len(shown) :])

        mark = yield from self.feed_until(keep, *marks)
        if not mark and spaces and not is_trimmed:
            yield kind("".join(spaces))
        return mark

    def begins_with(self, mark: str, *, is_taken: bool = True) -> Steps[bool]:
        """Returns whether the text goes on with ``mark`` after white space. If so, both are read with ``is_taken``, and the white space alone without."""
        while True:
            rest = self.text.lstrip()
            if rest.startswith(mark):
                self.text = rest[len(mark) :] if is_taken else rest
                return True
            if self.is_over or (rest and not mark.startswith(rest)):
                return False
            yield None

    def nested(self, nesting: Nesting) -> Steps[str]:
        """Returns the text until ``nesting`` is over."""
        parts: list[str] = []
        while True:
            parts.append(self.drop(nesting.take(self.text)))
            if nesting.is_over or self.is_over:
                return "".join(parts)
            yield None

    def skip_space(self) -> Steps[None]:
        """Reads the white space that follows."""
        while True:
            self.text = self.text.lstrip()
            if self.text or self.is_over:
                return
            yield None
