"""Blocks of the KV cache: entries of block tables, hashes of full blocks, and the pool that allocates and caches them.

``table[i]`` is the block that holds tokens ``16 i .. 16 i + 15`` of a sequence. A block is *held* (by one or more tables), *cached* (held by
none, but its hash is in the prefix cache) or *free*. Free blocks are allocated first, the most recently freed first, since its memory is
warm; then cached blocks are evicted in least-recently-used order.

The hash of a full block is a digest of the hash before it and of the block's own tokens; the first one follows from
``(weight_version, adapter, salt)``. A hash therefore identifies everything that the block's content depends on: a block of other weights can
never match, and correctness needs no flush after an update.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tandem.engine.kv_cache.block_events import BlockEvents
from tandem.types import WeightVersion
from tandem.types.kv_cache import BLOCK_TOKENS

if TYPE_CHECKING:
    from tandem.engine.kv_cache.state_rows import StateRows

_DIGEST_BYTES = 16


class BlockChange(NamedTuple):
    """Entry ``column`` of the table in ``row`` becomes ``block``."""

    row: int
    column: int
    block: int


class BlockCopy(NamedTuple):
    """Block ``source`` is copied to block ``target`` before the step writes anything."""

    source: int
    target: int


NULL_BLOCK = -1
"""The entry of a block table whose block was freed because its tokens are outside every layer's attention window."""


def blocks_for(tokens: int) -> int:
    """Returns the number of blocks that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@lru_cache(maxsize=256)
def root_hash(version: WeightVersion, adapter: str = "", salt: str = "") -> bytes:
    """Returns the hash that the chain of a sequence starts from."""
    text = f"{version.incarnation}\0{version.step}\0{len(adapter)}\0{adapter}\0{salt}"
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hashes(root: bytes, tokens: list[int], known: list[bytes] | None = None) -> list[bytes]:
    """Returns the hashes of all full blocks of ``tokens``; ``known``: the first of them, if computed before."""
    hashes = list(known or ())
    last = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        content = array("q", tokens[end - BLOCK_TOKENS : end]).tobytes()
        last = hashlib.blake2b(last + content, digest_size=_DIGEST_BYTES).digest()
        hashes.append(last)
    return hashes


class BlockPool:
    """Allocates ``num_blocks`` blocks by number, in O(1) per block. Holds no tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.events: BlockEvents | None = None
        """Where evictions are recorded, if anybody asks."""
        self.states: StateRows | None = None
        """Has a snapshot of states for some hashes, which is dropped with the hash."""

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> float:
        """The fraction of the blocks that is held."""
        return 1 - self.num_free_blocks / self.num_blocks

    def ref_count(self, block: int) -> int:
        """Returns how many tables hold ``block``."""
        return self._ref_counts[block]

    def get_new_block(self) -> int:
        """Returns a block with one reference and undefined content. The caller checks ``num_free_blocks`` first."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._evict(block)
        self._ref_counts[block] = 1
        return block

    def get_contiguous_blocks(self, count: int) -> list[int] | None:
        """Returns ``count`` adjacent blocks, the first at a multiple of ``count``, or ``None`` if there is no such run. Takes O(num_blocks): for
        caches that are divided into equal reservations."""
        for first in range(0, self.num_blocks - count + 1, count):
            run = range(first, first + count)
            if not any(self._ref_counts[block] for block in run):
                for block in run:
                    self._take(block)
                return list(run)
        return None

    def touch(self, block: int) -> None:
        """Adds a reference to a block that is held."""
        assert self._ref_counts[block] > 0, block
        self._ref_counts[block] += 1

    def free_block(self, block: int) -> None:
        """Drops a reference. With the last one the block becomes cached if it has a hash, else free."""
        assert self._ref_counts[block] > 0, block
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def free_blocks(self, table: list[int]) -> None:
        """Drops a reference to each block of a table except ``NULL_BLOCK``, in reverse: the start of a sequence is the most likely to be
        reused, so it is evicted last."""
        for block in reversed(table):
            if block >= 0:
                self.free_block(block)

    def cache_block(self, block: int, block_hash: bytes) -> bool:
        """Sets the hash of a held block, unless another block has that hash already. Returns whether it was set."""
        assert self._ref_counts[block] > 0, block
        if block_hash in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[block_hash] = block
        self._hashes[block] = block_hash
        return True

    def cached_hashes(self) -> Collection[bytes]:
        """Returns the hashes in the prefix cache."""
        return self._by_hash.keys()

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """Returns the block with ``block_hash``, with one more reference, or ``None``."""
        block = self._by_hash.get(block_hash)
        if block is not None:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1
        return block

    def reset_prefix_cache(self) -> None:
        """Removes every hash; cached blocks become free."""
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        self._free.extend(self._cached)
        self._cached.clear()
        if self.states is not None:
            self.states.clear()
        if self.events is not None:
            self.events.cleared()

    def _take(self, block: int) -> None:
        """Allocates one given block. O(1) for a cached one, O(num_blocks) for a free one."""
        if block in self._cached:
            del self._cached[block]
            self._evict(block)
        else:
            self._free.remove(block)
        self._ref_counts[block] = 1

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
            if self.states is not None:
                self.states.drop(block_hash)
            if self.events is not None:
                self.events.removed(block_hash)

    def check_integrity(self, held: dict[int, int] | None = None) -> None:
        """Raises ``AssertionError`` unless every block is in exactly one state and hashes agree in both directions. ``held``: the
        reference count that each held block must have (``None``: no block is held)."""
        held = held or {}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "a block is both free and cached"
        for block in range(self.num_blocks):
            assert self._ref_counts[block] == held.get(block, 0), (
                f"block {block} has {self._ref_counts[block]} references, its tables hold {held.get(block, 0)}"
            )
            states = (block in free) + (block in cached) + (self._ref_counts[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            block_hash = self._hashes[block]
            assert block_hash is None or self._by_hash[block_hash] == block, f"the hash of block {block} names another block"
            assert block not in cached or block_hash is not None, f"block {block} is cached without a hash"
            assert block not in free or block_hash is None, f"block {block} is free with a hash"
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes), "a hash names no block"
