"""The processor time and the memory of a thread that renders a chat template: counted while it works, and refused where a template takes more."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from tandem.runtime.process.processes import memory_of
from tandem.types import EndlessTemplate, UserError

MOST_SECONDS = 10.0
"""Of processor time, for one text: some hundred times what long conversations with many tools take."""
MOST_BYTES = 2**30
"""By which the process may grow while a text is rendered."""
_EVERY = 16
_LOOK_S = 0.02
"""Of processor time between two looks at the memory."""
_LARGE = 2**16
"""Elements of a value after which time and memory are looked at: many such are made between two counts."""
_MOST_CHAINED = 100
"""Iterators of iterators: Python frees them in C, where longer chains end the process."""


class RenderingLimits(threading.local):
    """The counts of a thread. ``until``: when its rendering has to end (``None``: nothing is rendered), after ``seconds``. ``memory``: the private bytes of
    the process when it began."""

    until: float | None = None
    seconds = 0.0
    memory = 0
    _count = 0
    _next_look = 0.0

    def count(self) -> None:
        """Counts one pass, call or operation. Raises ``EndlessTemplate`` and ``UserError`` where there were too many for their time and memory."""
        self._count += 1
        if self._count % _EVERY == 0:
            self.check()

    def check(self, is_large: bool = False) -> None:
        """Raises ``EndlessTemplate`` after the time that a text has, and ``UserError`` if the process has grown too much. ``is_large``: a large value has
        just been made."""
        if self.until is None:
            return
        now = time.thread_time()
        if now > self.until:
            raise EndlessTemplate(f"it takes more than {self.seconds:g} seconds of processor time, as one that loops without end")
        if is_large or now > self._next_look:
            self._next_look = now + _LOOK_S
            if private_bytes() - self.memory > MOST_BYTES:
                raise UserError(f"it takes more than {MOST_BYTES // 2**20:,} MiB of memory, as one that grows without end")

    def made(self, value: Any) -> Any:
        """Returns ``value``, which an operation has just made. Raises like ``check``."""
        if isinstance(value, Sized) and len(value) > _LARGE:
            self.check(is_large=True)
        return value

    def within(self, seconds: float | None) -> "_Rendering":
        """Returns the context in which texts are rendered in this thread, within ``seconds`` or what is left of those of a context around it; ``None``:
        ``MOST_SECONDS``."""
        return _Rendering(self, MOST_SECONDS if seconds is None else seconds)


class _Rendering:
    def __init__(self, limits: RenderingLimits, seconds: float) -> None:
        self._limits, self._seconds = limits, seconds

    def __enter__(self) -> None:
        limits = self._limits
        self._around = limits.until, limits.seconds
        now = time.thread_time()
        if limits.until is None:
            limits.memory, limits._next_look = private_bytes(), now + _LOOK_S
        if limits.until is None or now + self._seconds < limits.until:
            limits.until, limits.seconds = now + self._seconds, self._seconds

    def __exit__(self, *_: object) -> None:
        self._limits.until, self._limits.seconds = self._around


def private_bytes() -> int:
    """Returns the resident bytes of this process that no file has; 0 where the system does not tell."""
    try:
        return memory_of(os.getpid()).anonymous_bytes
    except ProcessLookupError:
        return 0


class Counted:
    """``items``, of which each is counted. ``depth``: how many others it reads through."""

    def __init__(self, items: Iterable[Any], count: Callable[[], None]) -> None:
        self._items, self._count = items, count
        self.depth: int = 1 + (items.depth if isinstance(items, Counted) else 0)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._count()
            yield item


class SizedCounted(Counted):
    """Of items that have a length: templates ask for that of a loop."""

    def __len__(self) -> int:
        assert isinstance(self._items, Sized)
        return len(self._items)


def counted(items: Any, count: Callable[[], None]) -> Counted:
    """Returns ``items``, of which each is counted."""
    return (SizedCounted if isinstance(items, Sized) else Counted)(items, count)


def chained(items: Iterator[Any], of: Any, count: Callable[[], None]) -> Counted:
    """Returns the ``items`` that a filter makes ``of`` others, while they are read. Raises ``UserError`` for a long chain of filters."""
    made = Counted(items, count)
    made.depth = 1 + (of.depth if isinstance(of, Counted) else 0)
    if made.depth > _MOST_CHAINED:
        raise UserError(f"it chains more than {_MOST_CHAINED} filters")
    return made
