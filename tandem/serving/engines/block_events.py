"""What the engines of one server have in their prefix caches, as numbered events for routers."""

import uuid
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

CLIENT_REQUEST_ID: ContextVar[str] = ContextVar("client_request_id", default="")
"""The ``X-Request-Id`` of the HTTP request that is answered: the name by which a router knows the prompt whose blocks are stored."""
MOST_EVENTS = 20_000
"""Events that are kept for those who ask late."""


class ServedBlockEvents:
    """The events of all engines as one sequence. A block counts as stored from the first engine that has it to the last. ``stream``: a new name with
    each server process."""

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self.stream = uuid.uuid4().hex
        self._events: deque[list[Any]] = deque(maxlen=most)
        self._last = 0
        self._holders: dict[str, set[int]] = {}

    def take(self, engine: int, events: Iterable[list[Any]], client_id: Callable[[str], str]) -> None:
        """Adds ``events`` of an engine (``tandem.engine.kv_cache.block_events``). ``client_id``: maps an engine's request id to the client's."""
        for kind, *fields in events:
            if kind == "stored":
                request_id, first, prompt_tokens, hashes = fields
                for block in hashes:
                    self._holders.setdefault(block, set()).add(engine)
                self._add(["stored", client_id(request_id), first, prompt_tokens, hashes])
            elif kind == "removed":
                self._drop(engine, fields[0])
            else:
                self.lost(engine)

    def lost(self, engine: int) -> None:
        """The cache of an engine is empty."""
        self._drop(engine, [block for block, holders in self._holders.items() if engine in holders])

    def since(self, stream: str, after: int) -> dict[str, Any]:
        """Returns the events that follow number ``after`` of ``stream``. ``is_reset``: they are not all that followed, so whoever asks starts anew with
        nothing known."""
        is_reset = stream != self.stream or not self._last - len(self._events) <= after <= self._last
        count = 0 if is_reset else self._last - after
        newest = [self._events[len(self._events) - count + i] for i in range(count)]
        return {"stream": self.stream, "last": self._last, "is_reset": is_reset, "events": newest}

    def _drop(self, engine: int, blocks: list[str]) -> None:
        gone = []
        for block in blocks:
            holders = self._holders.get(block)
            if holders is not None:
                holders.discard(engine)
                if not holders:
                    del self._holders[block]
                    gone.append(block)
        if gone:
            self._add(["removed", gone])

    def _add(self, event: list[Any]) -> None:
        self._events.append(event)
        self._last += 1
