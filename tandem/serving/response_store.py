"""The answers of ``/v1/responses`` that a later request may continue: a bounded number, the oldest unused of which are forgotten."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

_MOST_RESPONSES = 4096
_MOST_BYTES = 2**26


class StoredResponse(NamedTuple):
    """``conversation``: the messages up to the answer, without the instructions. ``whole``: the object ``response``. ``size_bytes``: of both."""

    conversation: Sequence[dict[str, Any]]
    whole: dict[str, Any]
    size_bytes: int


class ResponseStore:
    """Holds at most 4,096 answers and 64 MiB, in the memory of the server alone."""

    def __init__(self, most: int = _MOST_RESPONSES, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._held: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def put(self, id: str, conversation: Sequence[dict[str, Any]], whole: dict[str, Any]) -> None:
        """Stores the answer ``id``; one that is larger than everything that is held is not."""
        size = len(json.dumps([conversation, whole], ensure_ascii=False).encode("utf-8", "replace"))
        if size > self._most_bytes:
            return
        self._held[id] = StoredResponse(conversation, whole, size)
        self._bytes += size
        while len(self._held) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def get(self, id: str) -> StoredResponse | None:
        """Returns the answer ``id``, which counts as used then."""
        if id in self._held:
            self._held.move_to_end(id)
        return self._held.get(id)

    def remove(self, id: str) -> bool:
        """Forgets the answer ``id``. Returns whether there was one."""
        found = self._held.pop(id, None)
        if found is not None:
            self._bytes -= found.size_bytes
        return found is not None
