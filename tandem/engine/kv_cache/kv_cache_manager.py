"""The KV cache manager: block tables, prefix cache and swap space over two block pools. Holds no tensors."""

from collections import Counter
from collections.abc import Callable, Iterable

from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.kv_cache.block_events import BlockEvents
from tandem.engine.kv_cache.block_pool import NULL_BLOCK, BlockCopy, BlockPool, block_hashes, blocks_for, root_hash
from tandem.engine.kv_cache.state_rows import StateRows
from tandem.types import WeightVersion
from tandem.types.kv_cache import BLOCK_TOKENS

FIRST_VERSION = WeightVersion(0, 0)
DUMMY_VERSION = WeightVersion(-1, -1)
"""Of random weights, and of weights that are not verified yet."""
NewSlot = tuple[int, int, BlockCopy | None]
"""A column of a block table, its new block, and the copy that fills the block if it replaces a shared one."""


class KVCacheManager:
    """Allocates and frees the blocks of block tables.

    Args:
        num_blocks: Blocks of the cache.
        enable_prefix_caching: Whether full blocks enter the prefix cache.
        window: Size of the widest layer's attention window in tokens (0: unlimited). Blocks outside it are freed.
        reservation: Adjacent blocks that each sequence reserves at admission (0: as many as its tokens need).
        num_host_blocks: Blocks of the swap space in host memory.
        weight_version: The weights that keys and values are computed with; part of every hash.
        adapter_key: Maps the name of a LoRA adapter to its key in the hashes.
        states: Rows for the states of linear attention (``None``: the model has none).
    """

    def __init__(
        self, num_blocks: int, *, enable_prefix_caching: bool = True, window: int = 0, reservation: int = 0, num_host_blocks: int = 0,
        weight_version: WeightVersion = FIRST_VERSION, adapter_key: Callable[[str], str] = str, states: StateRows | None = None,
    ) -> None:
        self.block_pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.window = 0 if reservation else window
        self.reservation = reservation
        self.weight_version = weight_version
        self.states = self.block_pool.states = states
        self._adapter_key = adapter_key

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    # -- prompts -------------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, prefill: Prefill) -> list[int]:
        """Returns the blocks of the longest cached prefix of ``prefill``, each with one more reference.

        At least one token is left to compute, since its logits are needed. A prefill that needs the logits or the hidden states of all tokens has none. With
        ``states`` the prefix ends at a snapshot, unless the states are swapped in.
        """
        if not self.enable_prefix_caching or self.reservation:
            return []
        root = self._root(prefill.sequences[0].request)
        if prefill.root_hash != root:
            # Hashed once, however often admission is tried.
            prefill.root_hash, prefill.block_hashes = root, block_hashes(root, prefill.tokens)
        computed: list[int] = []
        if not (prefill.is_scored or prefill.sequences[0].request.reads_all_states):
            for block_hash in prefill.block_hashes[: (len(prefill.tokens) - 1) // BLOCK_TOKENS]:
                block = self.block_pool.get_cached_block(block_hash)
                if block is None:
                    break
                computed.append(block)
        prefill.num_matched_blocks = len(computed)
        if self.states is not None and not prefill.host_blocks:
            served = self.states.num_served(prefill.block_hashes[: len(computed)])
            self.block_pool.free_blocks(computed[served:])
            computed = computed[:served]
        return computed

    def num_new_blocks(self, prefill: Prefill, computed: list[int]) -> int:
        """Returns the number of blocks that ``prefill`` needs in addition to those that are ``computed``."""
        return self.reservation or blocks_for(len(prefill.tokens)) - len(_known_columns(prefill, computed))

    def allocate_prompt(self, prefill: Prefill, computed: list[int], num_reserved: int = 0) -> bool:
        """Allocates the blocks of all tokens of ``prefill``, the first of which are ``computed``. If that would leave fewer than
        ``num_reserved`` blocks free, frees ``computed`` and returns False."""
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
        prefill.num_computed_tokens = prefill.num_cached_tokens = len(computed) * BLOCK_TOKENS
        return True

    # -- slots ---------------------------------------------------------------------------------------------------------

    def allocate_slots(self, table: list[int], start: int, end: int) -> list[NewSlot] | None:
        """Makes positions ``start`` to ``end - 1`` of ``table`` writable: appends missing blocks and replaces shared ones, with a copy if they
        hold tokens before ``start``. Returns the new slots, or ``None`` and changes nothing if too few blocks are free."""
        pool, size = self.block_pool, len(table)
        columns = [column for column in range(start // BLOCK_TOKENS, blocks_for(end)) if column >= size or pool.ref_count(table[column]) > 1]
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
        """Returns whether ``allocate_slots`` would allocate a block for ``position`` of ``table``."""
        column = position // BLOCK_TOKENS
        return column >= len(table) or self.block_pool.ref_count(table[column]) > 1

    def num_blocks_for_slots(self, slots: Iterable[tuple[list[int], int]]) -> int:
        """Returns the number of blocks that ``allocate_slots`` takes for all of these (table, position) together: the last of the tables that
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

    # -- tables --------------------------------------------------------------------------------------------------------

    def fork(self, table: list[int]) -> list[int]:
        """Returns a second table over the same blocks."""
        for block in table:
            if block != NULL_BLOCK:
                self.block_pool.touch(block)
        return list(table)

    def free(self, table: list[int]) -> None:
        """Frees the blocks of ``table``."""
        self.block_pool.free_blocks(table)

    def remove_skipped_blocks(self, table: list[int], position: int) -> None:
        """Frees the blocks of ``table`` that no layer attends to from ``position`` on, and sets their entries to ``NULL_BLOCK``."""
        if self.window:
            for column in range(max(0, position - self.window + 1) // BLOCK_TOKENS - 1, -1, -1):
                if table[column] == NULL_BLOCK:
                    break
                self.block_pool.free_block(table[column])
                table[column] = NULL_BLOCK

    def num_exclusive_tokens(self, table: list[int]) -> int:
        """Returns the number of tokens in blocks that only ``table`` holds: those lost when it is freed."""
        return BLOCK_TOKENS * sum(block != NULL_BLOCK and self.block_pool.ref_count(block) == 1 for block in table)

    def num_freed_blocks(self, tables: Iterable[list[int]]) -> int:
        """Returns the number of blocks that freeing all of ``tables`` would free."""
        held = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        return sum(self.block_pool.ref_count(block) == count for block, count in held.items())

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    def cache_blocks(self, request: Request, hashes: list[bytes], table: list[int], num_tokens: int) -> None:
        """Adds the blocks of ``table``, a table of ``request``, that are full after ``num_tokens`` tokens to the prefix cache."""
        if not self.enable_prefix_caching or num_tokens < BLOCK_TOKENS:
            return
        full = list(zip(hashes[: num_tokens // BLOCK_TOKENS], table, strict=False))
        self.cache_prompt_blocks(request.id, len(request.prompt_token_ids), 0, [block_hash for block_hash, _ in full], [block for _, block in full])

    def cache_prompt_blocks(self, request_id: str, prompt_tokens: int, first: int, hashes: list[bytes], blocks: list[int]) -> None:
        """Adds ``blocks``, those of a prompt from number ``first`` on, to the prefix cache under ``hashes``."""
        pairs = enumerate(zip(hashes, blocks, strict=True))
        entered = [index for index, (block_hash, block) in pairs if block >= 0 and self.block_pool.cache_block(block, block_hash)]
        if entered and self.block_pool.events is not None:
            for start, last in _runs(entered):
                self.block_pool.events.stored(request_id, first + start, prompt_tokens, hashes[start : last + 1])

    def cache_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """As ``cache_blocks``, for a ``sequence`` whose later blocks have no hashes yet."""
        if not self.enable_prefix_caching or sequence.is_mixed:
            return
        hashes = sequence.block_hashes[: num_tokens // BLOCK_TOKENS]
        if num_tokens // BLOCK_TOKENS > len(hashes):
            hashes = block_hashes(self._root(sequence.request), sequence.known_tokens[:num_tokens], hashes)
            self.cache_blocks(sequence.request, hashes, sequence.blocks, num_tokens)
        if self.states is not None:
            self.states.publish(sequence, hashes, self.block_pool.cached_hashes())

    def record_block_events(self) -> BlockEvents:
        """Returns where changes of the prefix cache are recorded from now on."""
        if self.block_pool.events is None:
            self.block_pool.events = BlockEvents()
        return self.block_pool.events

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Block tables keep their blocks."""
        self.block_pool.reset_prefix_cache()

    def prompt_hashes(self, prompt_token_ids: list[int], adapter: str = "", cache_salt: str = "") -> list[bytes]:
        """Returns the hashes of the blocks that a request with this prompt looks for in the prefix cache: all full ones but for that of its last token."""
        looked_for = (len(prompt_token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return block_hashes(root_hash(self.weight_version, self._adapter_key(adapter), cache_salt), prompt_token_ids[:looked_for])

    def _root(self, request: Request) -> bytes:
        return root_hash(self.weight_version, self._adapter_key(request.adapter), request.cache_salt)

    # -- the swap space ------------------------------------------------------------------------------------------------

    def swap_out(self, table: list[int], num_tokens: int) -> tuple[list[int], list[BlockCopy]]:
        """Allocates host blocks for the first ``num_tokens`` tokens of ``table``; returns the table of host blocks and the copies to make. The
        caller checks ``host_pool.num_free_blocks`` first."""
        held = table[: blocks_for(num_tokens)]
        host_table = [NULL_BLOCK if block == NULL_BLOCK else self.host_pool.get_new_block() for block in held]
        return host_table, [BlockCopy(block, host) for block, host in zip(held, host_table, strict=True) if block != NULL_BLOCK]

    def swap_in(self, prefill: Prefill) -> list[BlockCopy]:
        """Returns the copies that restore the blocks that the prefix cache did not have, and frees the host blocks."""
        if self.states is not None:
            self.states.swap_in(prefill)
        first = prefill.num_computed_tokens // BLOCK_TOKENS
        pairs = zip(prefill.host_blocks[first:], prefill.blocks[first:], strict=False)
        copies = [BlockCopy(host, block) for host, block in pairs if host != NULL_BLOCK]
        self.free_host_blocks(prefill)
        return copies

    def free_host_blocks(self, prefill: Prefill) -> None:
        """Frees the swapped-out keys and values of ``prefill``."""
        self.host_pool.free_blocks(prefill.host_blocks)
        prefill.host_blocks = []
        if self.states is not None:
            self.states.free_host_row(prefill)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns the first and the last of each run of ascending ``numbers`` that follow each other."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _known_columns(prefill: Prefill, computed: list[int]) -> list[int]:
    """Returns the start of a table that needs no new blocks: ``computed`` blocks, then the skipped ones of a swapped-out sequence."""
    rest = prefill.host_blocks[len(computed) :]
    return list(computed) if not rest else list(computed) + [block for block in rest if block == NULL_BLOCK]
