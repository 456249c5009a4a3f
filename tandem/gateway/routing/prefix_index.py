"""Which backend has probably which beginnings of prompts in its prefix cache: those that it was sent.

An estimate, which backends correct that say what they evict (``tandem serve --kv-events``). It is bounded, and forgets what a backend had when its weights
change or it restarts.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tandem.gateway.backend import Backend

BLOCK_BYTES = 256
"""A block of text, about 64 tokens: what two prompts share beyond whole blocks is not worth a place in the index."""
BLOCK_TOKENS = BLOCK_BYTES // 4
MOST_BLOCKS = 1024
"""Blocks of a prompt that are looked at."""
_MOST_SENT = 4096
"""Requests of each backend whose blocks are known by their ids, until events name them."""
_MOST_BLOCKS = 50_000
"""Of each backend, about 5 MB: 3 million tokens."""

Prefix = tuple[int, ...]
"""Chained hashes of the blocks of a prompt: equal as far as two prompts begin alike."""


def read_prefix(content: dict[str, Any]) -> tuple[Prefix, float]:
    """Returns the blocks of a request's prompt, and the part of the prompt that each of them is. No blocks for requests of several prompts."""
    hashes: list[int] = []
    blocks, share = _blocks(content)
    before = b""
    for block in itertools.islice(blocks, MOST_BLOCKS):
        before = xxhash.xxh3_64_digest(before + block)
        hashes.append(int.from_bytes(before, "big"))
    return tuple(hashes), share


def _blocks(content: dict[str, Any]) -> tuple[Iterator[bytes], float]:
    """Returns the whole blocks of the prompt, which begin with the adapter or model and the salt: other keys and values; and the share of each."""
    own = f"{content.get('model')}\0{content.get('cache_salt')}\0"
    given = content.get("prompt", content.get("prompt_token_ids"))
    if isinstance(given, list) and given and isinstance(given[0], int):
        size, tokens = BLOCK_TOKENS, given
        return (f"{own}{tokens[start : start + size]}".encode() for start in range(0, len(tokens) - size + 1, size)), size / len(tokens)
    messages = content.get("messages")
    if isinstance(messages, list):
        # A conversation that goes on begins with the same messages.
        given = "\0".join(f"{each.get('role')}\0{each.get('content')}" for each in messages if isinstance(each, dict))
    data = (own + given).encode("utf-8", "surrogatepass") if isinstance(given, str) else b""
    size = BLOCK_BYTES
    return (data[start : start + size] for start in range(0, len(data) - size + 1, size)), size / max(1, len(data))


@dataclass
class _Cache:
    """What one backend has, as long as its ``state`` is the same. ``seen``: blocks, the one that was used longest ago first, and how many
    requests have used each. ``sent``: the newest requests.
    ``behind``: the blocks whose last token is in an engine's block, by the name of that."""

    state: tuple[str | None, int]
    seen: "OrderedDict[int, int]" = field(default_factory=OrderedDict)
    sent: "OrderedDict[str, tuple[Prefix, float]]" = field(default_factory=OrderedDict)
    behind: dict[str, set[int]] = field(default_factory=dict)

    def use(self, block: int, requests: int = 0) -> None:
        self.seen[block] = self.seen.get(block, 0) + requests
        self.seen.move_to_end(block)


class PrefixIndex:
    """The blocks that each backend was sent last, as many as its cache holds. ``most``: blocks that are kept of a backend at most.

    A backend that publishes what enters and leaves its cache corrects it: blocks that it has evicted are forgotten at once."""

    def __init__(self, most: int = _MOST_BLOCKS) -> None:
        self._most = most
        self._caches: dict[str, _Cache] = {}

    def add(self, prefix: Prefix, backend: Backend, request_id: str = "", share: float = 0.0) -> None:
        """Notes that ``backend`` is sent a prompt with ``prefix``. ``request_id`` and ``share`` (of the prompt in a block): as they come back in events."""
        cache = self._cache(backend)
        # The beginning is used last, so that a block is never kept without those before it.
        for block in reversed(prefix):
            cache.use(block, 1)
        most = self._capacity(backend) or self._most
        while len(cache.seen) > most:
            cache.seen.popitem(last=False)
        if request_id:
            cache.sent[request_id] = (prefix, share)
            if len(cache.sent) > _MOST_SENT:
                cache.sent.popitem(last=False)

    def cached_tokens(self, prefix: Prefix, backend: Backend) -> int:
        """Returns about how many tokens of a prompt with ``prefix`` the backend has computed before and still holds."""
        seen = self._cache(backend).seen
        return next((count for count, block in enumerate(prefix) if block not in seen), len(prefix)) * BLOCK_TOKENS

    def displaced_tokens(self, prefix: Prefix, backend: Backend) -> int:
        """Returns about how many tokens that several requests have used the backend evicts to make room for a prompt with ``prefix``; 0 if the size of its
        cache is not known."""
        seen, capacity = self._cache(backend).seen, self._capacity(backend)
        missing = sum(block not in seen for block in prefix)
        over = len(seen) + missing - capacity
        if not capacity or not missing or over <= 0:
            return 0
        own = set(prefix)
        oldest = itertools.islice(((block, uses) for block, uses in seen.items() if block not in own), over)
        return sum(uses > 1 for _, uses in oldest) * BLOCK_TOKENS

    def _capacity(self, backend: Backend) -> int:
        """Returns how many blocks the backend holds, as far as it or its settings say; 0 if neither does."""
        said = backend.config.cache_tokens or (0 if backend.engine is None else backend.engine.cache_tokens)
        return min(said // BLOCK_TOKENS, self._most)

    def size(self, backend: Backend) -> int:
        """Returns how many blocks the backend probably has."""
        return len(self._cache(backend).seen)

    def stored(self, backend: Backend, request_id: str, first: int, prompt_tokens: int, names: Sequence[str], *, block_size: int) -> None:
        """Notes that the engine's blocks ``names`` of ``block_size`` tokens, from number ``first`` of the prompt of a request, entered the cache."""
        cache = self._cache(backend)
        prefix, share = cache.sent.get(request_id, ((), 0.0))
        for number in range(len(prefix) - 1, -1, -1):
            # A text's bytes are divided among its tokens evenly: exact for token ids, near enough for a text.
            last = math.ceil((number + 1) * share * prompt_tokens / block_size - 1e-6) - 1
            if first <= last < first + len(names):
                cache.behind.setdefault(names[last - first], set()).add(prefix[number])
                cache.use(prefix[number])

    def removed(self, backend: Backend, names: Sequence[str]) -> None:
        """Forgets the blocks that are behind the engine's blocks ``names``, which it has evicted."""
        cache = self._cache(backend)
        for name in names:
            for block in cache.behind.pop(name, ()):
                cache.seen.pop(block, None)

    def forget(self, backend: Backend) -> None:
        """Forgets everything about a backend, as after events that were missed."""
        self._caches.pop(backend.name, None)

    def _cache(self, backend: Backend) -> _Cache:
        state = (backend.weights, backend.restarts)
        cache = self._caches.get(backend.name)
        if cache is None or cache.state != state:
            cache = self._caches[backend.name] = _Cache(state)
        return cache
