"""Preemption: a sequence gives up its row and its blocks, by swapping or to be computed again, and waits.

The victim has the lowest priority; among those it is the one that loses the fewest computed tokens, and among equals the last in order.
So of the most urgent sequences the one with the most computed tokens is never preempted while another holds blocks: some sequence always
finishes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.preemption_costs import PreemptionCosts
from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.core.request_queue import RequestQueue
from tandem.engine.core.running import RunningSequences
from tandem.engine.core.scheduler_output import SequenceId
from tandem.engine.kv_cache.block_table import RELEASED, BlockCopy, blocks_for
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.kernels.api import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """``mode``: ``swap`` (as far as host blocks are free), ``recompute``, or ``auto``, which takes what costs less by ``costs``; without
    costs it swaps."""

    mode: str = "recompute"
    costs: Callable[[], PreemptionCosts | None] = lambda: None

    def swaps(self, num_blocks: int, num_free_host_blocks: int, num_computed: int, num_lost: int) -> bool:
        """Returns whether a sequence with ``num_computed`` tokens in ``num_blocks`` blocks is swapped out. ``num_lost``: the tokens that
        would otherwise be computed again."""
        if self.mode == "recompute" or not 0 < num_blocks <= num_free_host_blocks:
            return False
        costs = self.costs() if self.mode == "auto" else None
        return costs is None or costs.swap_s(num_blocks * BLOCK_TOKENS) < costs.recompute_s(min(num_computed, num_lost), num_computed)


class Preemption:
    """Moves what is running back to ``waiting``. ``swap_outs``: the copies to host memory that the step under planning makes."""

    def __init__(
        self, policy: PreemptionPolicy, kv_cache: KVCacheManager, running: RunningSequences, waiting: RequestQueue, counts: Counter[Transition]
    ) -> None:
        self.policy = policy
        self.swap_outs: list[BlockCopy] = []
        self._kv_cache, self._running, self._waiting, self._counts = kv_cache, running, waiting, counts

    def outranks(self, prefill: Prefill) -> bool:
        """Returns whether a less urgent sequence than those of ``prefill`` holds blocks."""
        return any(holder.order[0] > prefill.order[0] for holder in self._running.holders)

    def preempt_for(self, prefill: Prefill, reserve: Callable[[int], int]) -> list[SequenceId]:
        """Where ``prefill`` lacks rows or blocks, preempts less urgent sequences until it has them; none, where that would not suffice.
        ``reserve`` maps the number of sequences that run beside it to the blocks that must stay free then."""
        kv_cache, running, urgency = self._kv_cache, self._running, prefill.order[0]
        computed = kv_cache.get_computed_blocks(prefill)
        num_new = kv_cache.num_new_blocks(prefill, computed)
        kv_cache.free(computed)
        lower = [holder for holder in running.holders if holder.order[0] > urgency]
        num_rows = sum(len(holder.rows) if isinstance(holder, Prefill) else 1 for holder in lower)
        num_blocks = kv_cache.num_freed_blocks(holder.blocks for holder in lower)
        num_others = len(running) - sum(isinstance(holder, Sequence) for holder in lower)

        def has_room(more_rows: int, more_blocks: int, num_running: int) -> bool:
            has_rows = more_rows + len(running.free_rows) >= len(prefill.sequences)
            return has_rows and more_blocks + kv_cache.num_free_blocks >= num_new + reserve(num_running)

        names: list[SequenceId] = []
        if has_room(num_rows, num_blocks, num_others):
            while not has_room(0, 0, len(running)) and (more := self.preempt_one(above=urgency)):
                names += more
        return names

    def preempt_one(self, above: int | None = None) -> list[SequenceId]:
        """Preempts one holder of blocks; returns its sequences, none where there is no holder. ``above``: only one whose priority value is
        greater."""
        victim = min(
            (holder for holder in self._running.holders if above is None or holder.order[0] > above),
            key=lambda v: (-v.order[0], self._kv_cache.num_exclusive_tokens(v.blocks), tuple(-part for part in v.order)),
            default=None,
        )
        if victim is None:
            return []
        if isinstance(victim, Prefill):
            return self._preempt_prefill(victim, Transition.RECOMPUTE)
        self._running.read_back([victim])
        host_blocks = self._swap_out(victim)
        return self._preempt_decoding([victim], Transition.SWAP_OUT if host_blocks else Transition.RECOMPUTE, host_blocks=host_blocks)

    def preempt_all(self, why: Transition) -> list[SequenceId]:
        """Preempts everything that holds blocks or is swapped out; none of it is valid from now on."""
        names = self._preempt_decoding(list(self._running.by_row.values()), why, keep_cache=False)
        if self._running.prefilling is not None:
            names += self._preempt_prefill(self._running.prefilling, why)
        self.drop_swapped()
        return names

    def drop_swapped(self, is_void: Callable[[Prefill], bool] = lambda _: True) -> None:
        """Frees the host blocks of waiting prefills that are void. What is not aborted is computed again."""
        if self._kv_cache.host_pool.num_free_blocks < self._kv_cache.host_pool.num_blocks:
            for prefill in self._waiting:
                if prefill.host_blocks and is_void(prefill):
                    self._kv_cache.free_host_blocks(prefill)

    def take_swap_outs(self) -> tuple[BlockCopy, ...]:
        swap_outs, self.swap_outs = tuple(self.swap_outs), []
        return swap_outs

    def _swap_out(self, sequence: Sequence) -> list[int]:
        """Returns the host blocks to which the step copies what ``sequence`` has computed; none where it is computed again instead."""
        kv_cache, computed = self._kv_cache, len(sequence.known_tokens) - 1
        num_blocks = sum(block != RELEASED for block in sequence.blocks[: blocks_for(computed)])
        num_lost = kv_cache.num_exclusive_tokens(sequence.blocks)
        if not self.policy.swaps(num_blocks, kv_cache.host_pool.num_free_blocks, computed, num_lost):
            return []
        host_blocks, copies = kv_cache.swap_out(sequence.blocks, computed)
        self.swap_outs += copies
        return host_blocks

    def _preempt_decoding(
        self, sequences: list[Sequence], why: Transition, keep_cache: bool = True, host_blocks: list[int] | None = None
    ) -> list[SequenceId]:
        self._running.read_back(sequences)
        self._running.leave(sequences, keep_cache)
        for sequence in sequences:
            sequence.is_mixed = sequence.is_mixed and bool(host_blocks)
            self._requeue(Prefill([sequence], sequence.known_tokens, host_blocks=list(host_blocks or ())), why)
        return [(sequence.request.id, sequence.index) for sequence in sequences]

    def _preempt_prefill(self, prefill: Prefill, why: Transition) -> list[SequenceId]:
        self._running.stop_prefill(prefill)
        for sequence in prefill.sequences:
            sequence.is_mixed = False
        self._requeue(prefill, why)
        return [(sequence.request.id, sequence.index) for sequence in prefill.sequences]

    def _requeue(self, prefill: Prefill, why: Transition) -> None:
        for sequence in prefill.sequences:
            move(sequence, why, self._counts)
            sequence.preemptions += 1
        self._waiting.push_preempted(prefill)
