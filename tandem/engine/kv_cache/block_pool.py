"""Blocks of the KV cache: who holds which, in O(1) a call.

A block is *held* (by one or more tables), *cached* (held by nobody, but its content still has a key under which it can
be found) or *free*. Free blocks are given out first, the last released first, since its memory is warm; then cached
ones, the least recently used first. """

from collections import OrderedDict


class BlockAllocator:
    """Reference counts, a free list and the keys of ``count`` blocks. Knows numbers only, no tensors."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = [0] * count
        self._keys: list[bytes | None] = [None] * count
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free_count(self) -> int:
        """Blocks that ``allocate`` can give out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """A block with one reference and no content worth keeping. The caller has looked at ``free_count``."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def allocate_run(self, count: int) -> list[int] | None:
        """``count`` blocks side by side, the first at a multiple of ``count``; ``None`` where there is no such run. Looks at
        all blocks: for caches that are cut into equal reservations."""
        for first in range(0, self.count - count + 1, count):
            run = range(first, first + count)
            if not any(self._references[block] for block in run):
                for block in run:
                    self._take(block)
                return list(run)
        return None

    def retain(self, block: int) -> None:
        """One more holder of a block that is held."""
        assert self._references[block] > 0, block
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less. With the last one the block becomes cached where it has a key, else free."""
        assert self._references[block] > 0, block
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def release_all(self, blocks: list[int]) -> None:
        """Release a table's blocks (a negative entry is none), the last first: the start of a sequence is the likeliest to
        be wanted again."""
        for block in reversed(blocks):
            if block >= 0:
                self.release(block)

    def name(self, block: int, key: bytes) -> None:
        """Give the content of a held block a key. Where another block has that key already, this one stays nameless."""
        assert self._references[block] > 0, block
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """The block whose content has ``key``, with one reference more, or ``None``."""
        block = self._by_key.get(key)
        if block is not None:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        return block

    def forget_all(self) -> None:
        """Take every key away; cached blocks become free."""
        self._by_key.clear()
        self._keys = [None] * self.count
        self._free.extend(self._cached)
        self._cached.clear()

    def _take(self, block: int) -> None:
        """As ``allocate``, for a block of the caller's choice. Cached ones are looked up, free ones searched for."""
        if block in self._cached:
            del self._cached[block]
            self._forget(block)
        else:
            self._free.remove(block)
        self._references[block] = 1

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

    def check_integrity(self, held: dict[int, int] | None = None) -> None:
        """Raise ``AssertionError`` unless every block is in exactly one state and keys agree in both directions.
        ``held``: the reference count that each held block must have (none: nothing is held)."""
        held = held or {}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "a block is free and cached at once"
        for block in range(self.count):
            assert self._references[block] == held.get(block, 0), (
                f"block {block} has {self._references[block]} references, its tables hold {held.get(block, 0)}"
            )
            states = (block in free) + (block in cached) + (self._references[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            key = self._keys[block]
            assert key is None or self._by_key[key] == block, f"block {block} is not where its key says"
            assert block not in cached or key is not None, f"block {block} is cached without a key"
            assert block not in free or key is None, f"block {block} is free with a key"
        assert len(self._by_key) == sum(key is not None for key in self._keys), "a key names no block"
