"""Which backend has probably which beginnings of prompts in its prefix cache: those that it was sent.

An estimate: backends evict what they need not, and do not say so. It is bounded, and forgets what a backend had when its weights change or it restarts.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import xxhash

from tandem.gateway.backend import Backend

BLOCK_BYTES = 256
"""A block of text, about 64 tokens: what two prompts share beyond whole blocks is not worth a place in the index."""
BLOCK_TOKENS = BLOCK_BYTES // 4
MOST_BLOCKS = 1024
"""Blocks of a prompt that are looked at."""
_MOST_BLOCKS = 50_000
"""Of each backend, about 5 MB: 3 million tokens."""

Prefix = tuple[int, ...]


def prefix_of(content: dict[str, Any]) -> Prefix:
    """Returns the chained hashes of the blocks of a request's prompt: equal as far as two prompts begin alike. Empty for requests of several prompts."""
    hashes: list[int] = []
    before = b""
    for block in _blocks(content):
        before = xxhash.xxh3_64_digest(before + block)
        hashes.append(int.from_bytes(before, "big"))
        if len(hashes) == MOST_BLOCKS:
            break
    return tuple(hashes)


def _blocks(content: dict[str, Any]) -> Iterator[bytes]:
    """Yields the whole blocks of the prompt, which begin with the adapter or model and the salt: other keys and values."""
    own = f"{content.get('model')}\0{content.get('cache_salt')}\0"
    given = content.get("prompt", content.get("prompt_token_ids"))
    if isinstance(given, list) and given and isinstance(given[0], int):
        size = BLOCK_TOKENS
        for start in range(0, len(given) - size + 1, size):
            yield f"{own}{given[start : start + size]}".encode()
        return
    messages = content.get("messages")
    if isinstance(messages, list):
        # A conversation that goes on begins with the same messages.
        given = "\0".join(f"{each.get('role')}\0{each.get('content')}" for each in messages if isinstance(each, dict))
    if isinstance(given, str):
        data = (own + given).encode("utf-8", "surrogatepass")
        for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]


class PrefixIndex:
    """The blocks that each backend was sent last, as many as its cache holds. ``most``: blocks that are kept of a backend at most."""

    def __init__(self, most: int = _MOST_BLOCKS) -> None:
        self._most = most
        self._seen: dict[str, OrderedDict[int, None]] = {}
        self._states: dict[str, tuple[str | None, int]] = {}

    def add(self, prefix: Prefix, backend: Backend) -> None:
        """Notes that ``backend`` is sent a prompt with ``prefix``."""
        seen = self._blocks_of(backend)
        # The beginning is used last, so that a block is never kept without those before it.
        for block in reversed(prefix):
            seen[block] = None
            seen.move_to_end(block)
        held = backend.config.cache_tokens // BLOCK_TOKENS
        while len(seen) > (min(held, self._most) if held else self._most):
            seen.popitem(last=False)

    def cached_tokens(self, prefix: Prefix, backend: Backend) -> int:
        """Returns about how many tokens of a prompt with ``prefix`` the backend has computed before and still holds."""
        seen = self._blocks_of(backend)
        return next((count for count, block in enumerate(prefix) if block not in seen), len(prefix)) * BLOCK_TOKENS

    def _blocks_of(self, backend: Backend) -> "OrderedDict[int, None]":
        state = _state(backend)
        if self._states.get(backend.name) != state:
            self._states[backend.name], self._seen[backend.name] = state, OrderedDict()
        return self._seen[backend.name]


def _state(backend: Backend) -> tuple[str | None, int]:
    """Returns what a backend's cache belongs to: the version of its weights, and how often it was away."""
    return backend.weights, backend.restarts
