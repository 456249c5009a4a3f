"""Full blocks that can be used again.

The key of a block is a digest of the key before it and of its own tokens; the first one follows from
``(weight_version, adapter, salt)``. So a key names everything that the block's content depends on, a block of other
weights can never match, and no flush is needed after an update.
"""

import hashlib
from array import array

from tandem.engine.kv_cache.block_pool import BlockAllocator
from tandem.kernels.api import BLOCK_TOKENS
from tandem.types import WeightVersion

_DIGEST_BYTES = 16


def root_key(version: WeightVersion, adapter: str = "", salt: str = "") -> bytes:
    """The key that a sequence's chain starts from."""
    text = f"{version.incarnation}\0{version.step}\0{len(adapter)}\0{adapter}\0{salt}"
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def chain(root: bytes, tokens: list[int], known: list[bytes] | None = None) -> list[bytes]:
    """The keys of all full blocks of ``tokens``; ``known``: the first of them."""
    keys = list(known or ())
    key = keys[-1] if keys else root
    for end in range((len(keys) + 1) * BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        content = array("q", tokens[end - BLOCK_TOKENS : end]).tobytes()
        key = hashlib.blake2b(key + content, digest_size=_DIGEST_BYTES).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Finds and names blocks of ``allocator``. Does neither where ``enabled`` is false."""

    def __init__(self, allocator: BlockAllocator, enabled: bool) -> None:
        self.allocator = allocator
        self.enabled = enabled

    def keys(self, root: bytes, tokens: list[int]) -> list[bytes]:
        return chain(root, tokens) if self.enabled else []

    def match(self, keys: list[bytes], tokens: int) -> list[int]:
        """The longest cached start, each block with one reference more. At least one of the ``tokens`` is left over,
        since its logits are wanted."""
        found = []
        for key in keys[: (tokens - 1) // BLOCK_TOKENS]:
            block = self.allocator.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, keys: list[bytes], table: list[int], tokens: int) -> None:
        """Name the blocks of ``table`` that the first ``tokens`` tokens fill."""
        for key, block in zip(keys[: tokens // BLOCK_TOKENS], table, strict=False):
            if block >= 0:
                self.allocator.name(block, key)
