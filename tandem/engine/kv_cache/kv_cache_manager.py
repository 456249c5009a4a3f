"""The KV cache as the scheduler sees it: block tables, prefix cache and swap space over two pools of blocks."""

from collections import Counter
from collections.abc import Callable, Iterable

from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.kv_cache.block_hash import block_hashes, root_hash
from tandem.engine.kv_cache.block_pool import BlockPool
from tandem.engine.kv_cache.block_table import RELEASED, BlockCopy, blocks_for
from tandem.kernels.api import BLOCK_TOKENS
from tandem.types import WeightVersion

FIRST_VERSION = WeightVersion(0, 0)
NewSlot = tuple[int, int, BlockCopy | None]
"""A column of a table, its new block, and the copy that fills the block where it replaces a shared one."""


class KVCacheManager:
    """Gives block tables their blocks and takes them back.

    Args:
        num_blocks: Blocks of the cache.
        enable_prefix_caching: Whether full blocks can be found again by their hashes.
        window: Tokens that the widest layer looks back (0: all). Blocks behind it are given back.
        reservation: Adjacent blocks that each sequence reserves at admission (0: as many as its tokens need).
        num_host_blocks: Blocks of the swap space in host memory.
        weight_version: The weights that keys and values are computed with; part of every hash.
        adapter_key: Maps the name of a LoRA adapter to what the hashes know it by.
    """

    def __init__(
        self, num_blocks: int, *, enable_prefix_caching: bool = True, window: int = 0, reservation: int = 0, num_host_blocks: int = 0,
        weight_version: WeightVersion = FIRST_VERSION, adapter_key: Callable[[str], str] = str,
    ) -> None:
        self.block_pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.window = 0 if reservation else window
        self.reservation = reservation
        self.weight_version = weight_version
        self._adapter_key = adapter_key

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    # -- prompts -------------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, prefill: Prefill) -> list[int]:
        """Returns the longest cached start of ``prefill``, each block with one more reference. At least one token is left to
        compute, since its logits are needed; nothing is looked up where all of the prompt's logits are."""
        if not self.enable_prefix_caching or self.reservation:
            return []
        root = self._root(prefill.sequences[0].request)
        if prefill.root_hash != root:
            # Once, however often admission is tried.
            prefill.root_hash, prefill.block_hashes = root, block_hashes(root, prefill.tokens)
        computed: list[int] = []
        if not prefill.is_scored:
            for block_hash in prefill.block_hashes[: (len(prefill.tokens) - 1) // BLOCK_TOKENS]:
                block = self.block_pool.get_cached_block(block_hash)
                if block is None:
                    break
                computed.append(block)
        return computed

    def num_new_blocks(self, prefill: Prefill, computed: list[int]) -> int:
        """Returns the blocks that ``prefill`` needs besides those that are ``computed``."""
        return self.reservation or blocks_for(len(prefill.tokens)) - len(_known_columns(prefill, computed))

    def allocate_prompt(self, prefill: Prefill, computed: list[int], num_reserved: int = 0) -> bool:
        """Gives ``prefill`` the blocks of all its tokens, the first of which are ``computed``. Where that would leave fewer than
        ``num_reserved`` blocks free, returns False and gives ``computed`` back."""
        blocks: list[int] | None = None
        if self.num_new_blocks(prefill, computed) + num_reserved <= self.num_free_blocks:
            if self.reservation:
                blocks = self.block_pool.get_contiguous_blocks(self.reservation)
            else:
                blocks = _known_columns(prefill, computed)
                self.allocate_slots(blocks, len(blocks) * BLOCK_TOKENS, len(prefill.tokens))
        if blocks is None:
            self.block_pool.free_blocks(computed)
            return False
        prefill.blocks = blocks
        prefill.computed = prefill.cached = len(computed) * BLOCK_TOKENS
        return True

    # -- slots ---------------------------------------------------------------------------------------------------------

    def allocate_slots(self, table: list[int], start: int, end: int) -> list[NewSlot] | None:
        """Makes positions ``start`` to ``end - 1`` of ``table`` writable: missing blocks are appended, and shared ones are replaced
        by a block of the table's own, which is a copy where it holds tokens before ``start``. Returns what has changed, or
        ``None`` where too few blocks are free; nothing has changed then."""
        pool = self.block_pool
        columns = [column for column in range(start // BLOCK_TOKENS, blocks_for(end)) if self._needs_block(table, column)]
        if len(columns) > pool.num_free_blocks:
            return None
        slots: list[NewSlot] = []
        for column in columns:
            block = pool.get_new_block()
            if column == len(table):
                table.append(block)
                slots.append((column, block, None))
            else:
                shared, table[column] = table[column], block
                pool.free_block(shared)
                slots.append((column, block, BlockCopy(shared, block) if column * BLOCK_TOKENS < start else None))
        return slots

    def needs_slot(self, table: list[int], position: int) -> bool:
        """Returns whether ``allocate_slots`` must give ``position`` of ``table`` a block before it can be written."""
        return self._needs_block(table, position // BLOCK_TOKENS)

    def num_blocks_for_slots(self, slots: Iterable[tuple[list[int], int]]) -> int:
        """Returns the blocks that ``allocate_slots`` takes for these (table, position) together: the last of the tables that
        share a block keeps it."""
        shared: Counter[int] = Counter()
        missing = 0
        for table, position in slots:
            column = position // BLOCK_TOKENS
            if column == len(table):
                missing += 1
            else:
                shared[table[column]] += 1
        return missing + sum(min(count, self.block_pool.ref_count(block) - 1) for block, count in shared.items())

    def _needs_block(self, table: list[int], column: int) -> bool:
        return column >= len(table) or self.block_pool.ref_count(table[column]) > 1

    # -- tables --------------------------------------------------------------------------------------------------------

    def fork(self, table: list[int]) -> list[int]:
        """Returns a second table over the same blocks."""
        for block in table:
            if block != RELEASED:
                self.block_pool.touch(block)
        return list(table)

    def free(self, table: list[int]) -> None:
        """Gives the blocks of ``table`` back."""
        self.block_pool.free_blocks(table)

    def free_behind_window(self, table: list[int], position: int) -> None:
        """Gives back the blocks that no layer looks at from ``position`` on."""
        if self.window:
            for column in range(max(0, position - self.window + 1) // BLOCK_TOKENS - 1, -1, -1):
                if table[column] == RELEASED:
                    break
                self.block_pool.free_block(table[column])
                table[column] = RELEASED

    def num_exclusive_tokens(self, table: list[int]) -> int:
        """Returns the tokens in blocks that only ``table`` holds: what is lost when it is given back."""
        return BLOCK_TOKENS * sum(block != RELEASED and self.block_pool.ref_count(block) == 1 for block in table)

    def num_freed_blocks(self, tables: Iterable[list[int]]) -> int:
        """Returns the blocks that would be free after all of ``tables`` were given back."""
        held = Counter(block for table in tables for block in table if block != RELEASED)
        return sum(self.block_pool.ref_count(block) == count for block, count in held.items())

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    def cache_blocks(self, hashes: list[bytes], table: list[int], num_tokens: int) -> None:
        """Lets the blocks of ``table`` that the first ``num_tokens`` tokens fill be found by their hashes."""
        if self.enable_prefix_caching:
            for block_hash, block in zip(hashes[: num_tokens // BLOCK_TOKENS], table, strict=False):
                if block >= 0:
                    self.block_pool.cache_block(block, block_hash)

    def cache_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``cache_blocks``, for the tokens of ``sequence``, whose later blocks have no hashes yet."""
        if self.enable_prefix_caching and not sequence.is_mixed and num_tokens // BLOCK_TOKENS > len(sequence.block_hashes):
            hashes = block_hashes(self._root(sequence.request), sequence.known_tokens[:num_tokens], sequence.block_hashes)
            self.cache_blocks(hashes, sequence.blocks, num_tokens)

    def reset_prefix_cache(self) -> None:
        """Forgets what cached blocks hold. Tables keep theirs."""
        self.block_pool.reset_prefix_cache()

    def _root(self, request: Request) -> bytes:
        return root_hash(self.weight_version, self._adapter_key(request.adapter), request.cache_salt)

    # -- the swap space ------------------------------------------------------------------------------------------------

    def swap_out(self, table: list[int], num_tokens: int) -> tuple[list[int], list[BlockCopy]]:
        """Takes host blocks for the first ``num_tokens`` tokens of ``table``; returns the table of host blocks and the copies to
        make. The caller checks ``host_pool.num_free_blocks`` before."""
        held = table[: blocks_for(num_tokens)]
        host_table = [RELEASED if block == RELEASED else self.host_pool.get_new_block() for block in held]
        return host_table, [BlockCopy(block, host) for block, host in zip(held, host_table, strict=True) if block != RELEASED]

    def swap_in(self, prefill: Prefill) -> list[BlockCopy]:
        """Returns the copies that bring back what the prefix cache did not have, and frees the host blocks."""
        first = prefill.computed // BLOCK_TOKENS
        pairs = zip(prefill.host_blocks[first:], prefill.blocks[first:], strict=False)
        copies = [BlockCopy(host, block) for host, block in pairs if host != RELEASED]
        self.free_host_blocks(prefill)
        return copies

    def free_host_blocks(self, prefill: Prefill) -> None:
        """Gives up the swapped-out keys and values of ``prefill``, which is computed again where it has not come back."""
        self.host_pool.free_blocks(prefill.host_blocks)
        prefill.host_blocks = []


def _known_columns(prefill: Prefill, computed: list[int]) -> list[int]:
    """The start of a table that needs no new blocks: ``computed`` ones, then those behind the window of a swapped-out sequence."""
    behind = prefill.host_blocks[len(computed) :]
    return list(computed) + [block for block in behind if block == RELEASED]
