"""Changes of the prefix cache, for those who choose the engine that has a prompt's beginning: vLLM's ``BlockStored``, ``BlockRemoved`` and
``AllBlocksCleared``."""

from typing import Any

_SHOWN_BYTES = 8
"""Of a hash: two blocks of one cache with the same 64 bits are not to be expected, and would cost a prompt's recomputation."""


class BlockEvents:
    """Collects events between two calls of ``take``, as lists that JSON can hold:

    - ``["stored", request id, index of the first block, tokens of the prompt, hashes]``: blocks of one request, one after the other, entered the cache;
    - ``["removed", hashes]``: blocks were evicted;
    - ``["cleared"]``: all were.
    """

    def __init__(self) -> None:
        self._events: list[list[Any]] = []

    def stored(self, request_id: str, first: int, prompt_tokens: int, hashes: list[bytes]) -> None:
        self._events.append(["stored", request_id, first, prompt_tokens, [_shown(each) for each in hashes]])

    def removed(self, block_hash: bytes) -> None:
        if self._events and self._events[-1][0] == "removed":
            self._events[-1][1].append(_shown(block_hash))
        else:
            self._events.append(["removed", [_shown(block_hash)]])

    def cleared(self) -> None:
        self._events.append(["cleared"])

    def take(self) -> list[list[Any]]:
        """Returns the events since the last call, in their order."""
        events, self._events = self._events, []
        return events


def _shown(block_hash: bytes) -> str:
    return block_hash[:_SHOWN_BYTES].hex()
