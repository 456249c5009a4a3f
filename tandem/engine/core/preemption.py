"""Preemption: which sequence gives up its row and blocks when they run out, and whether its keys and values are swapped or recomputed.

The victim has the lowest priority; ties go to the sequence that loses the fewest computed tokens, then to the last in order. Hence, of the
most urgent sequences, the one with the most computed tokens is never preempted while another holds blocks: some sequence always finishes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.request import Prefill, RequestQueue, Sequence
from tandem.engine.core.running import RunningSequences
from tandem.engine.core.scheduler_output import SequenceId
from tandem.engine.kv_cache.block_pool import NULL_BLOCK, BlockCopy, blocks_for
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.types.kv_cache import BLOCK_TOKENS

_DECAY = 0.9
"""The factor by which each prefill step reduces the weight of earlier ones in the moving average of its speed."""
_PROBE_BLOCKS = 16
"""Blocks of the longer of the two copies that are timed."""


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Seconds on this machine, as linear models. ``token_s``: to recompute a token. ``pair_s``: for its attention to one earlier token.
    ``swap_token_s``: to copy its keys and values out and back. ``swap_start_s``: the fixed cost of a swap."""

    token_s: float
    pair_s: float
    swap_token_s: float
    swap_start_s: float

    def swap_s(self, tokens: int) -> float:
        """Returns the seconds of a swap of ``tokens`` tokens, out and back."""
        return self.swap_start_s + tokens * self.swap_token_s

    def recompute_s(self, lost_tokens: int, tokens: int) -> float:
        """Returns the seconds to recompute the last ``lost_tokens`` of ``tokens``; the blocks of the others are shared and stay."""
        return lost_tokens * (self.token_s + self.pair_s * (tokens - lost_tokens / 2))


class PreemptionCostMeter:
    """Measures ``PreemptionCosts`` while an engine runs. They affect time only: swapped or recomputed, a sequence has the same bits.

    Copies are timed once, when the costs are first needed; ``measure_swap(n)`` returns the seconds to copy n blocks one way. Recomputing is
    estimated from the operations per second of recent prefill steps: a token takes two operations per parameter, and four per component of a
    query and per token that it attends to.
    """

    def __init__(self, shapes: ModelShapes, num_blocks: int, measure_swap: Callable[[int], float]) -> None:
        self._token_operations = 2.0 * parameter_count(shapes)
        self._pair_operations = 4.0 * shapes.num_hidden_layers * shapes.query_size
        self._num_blocks = min(_PROBE_BLOCKS, num_blocks)
        self._measure_swap = measure_swap
        self._swap: tuple[float, float] | None = None
        self._operations = self._seconds = 0.0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records a step of ``num_tokens`` tokens, most of them of prompts."""
        self._operations = _DECAY * self._operations + num_tokens * self._token_operations
        self._seconds = _DECAY * self._seconds + seconds

    def costs(self) -> PreemptionCosts | None:
        """Returns the measured costs; ``None`` before the first prefill step."""
        if not self._seconds:
            return None
        if self._swap is None:
            one, many = self._measure_swap(1), self._measure_swap(self._num_blocks)
            per_block = max(0.0, many - one) / max(1, self._num_blocks - 1)
            # Out and back.
            self._swap = 2 * per_block / BLOCK_TOKENS, 2 * max(0.0, one - per_block)
        per_operation = self._seconds / self._operations
        return PreemptionCosts(self._token_operations * per_operation, self._pair_operations * per_operation, *self._swap)


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """``mode``: ``swap`` (while host blocks are free), ``recompute``, or ``auto``, which takes the cheaper of the two by ``costs``, and swaps
    before they are known."""

    mode: str = "recompute"
    costs: Callable[[], PreemptionCosts | None] = lambda: None

    def swaps(self, num_blocks: int, num_free_host_blocks: int, num_computed: int, num_lost: int) -> bool:
        """Returns whether a sequence with ``num_computed`` tokens in ``num_blocks`` blocks is swapped out. ``num_lost``: the tokens that
        would otherwise be recomputed."""
        if self.mode == "recompute" or not 0 < num_blocks <= num_free_host_blocks:
            return False
        costs = self.costs() if self.mode == "auto" else None
        return costs is None or costs.swap_s(num_blocks * BLOCK_TOKENS) < costs.recompute_s(min(num_computed, num_lost), num_computed)


class Preemption:
    """Moves running sequences back to ``waiting``. ``swap_outs``: copies to host memory for the step that is being scheduled."""

    def __init__(
        self, policy: PreemptionPolicy, kv_cache: KVCacheManager, running: RunningSequences, waiting: RequestQueue, counts: Counter[Transition]
    ) -> None:
        self.policy = policy
        self.swap_outs: list[BlockCopy] = []
        self._kv_cache, self._running, self._waiting, self._counts = kv_cache, running, waiting, counts

    def outranks(self, prefill: Prefill) -> bool:
        """Returns whether a sequence of lower priority than ``prefill`` owns blocks."""
        return any(owner.order[0] > prefill.order[0] for owner in self._running.block_owners)

    def preempt_for(self, prefill: Prefill, reserve: Callable[[int], int]) -> list[SequenceId]:
        """Preempts sequences of lower priority until ``prefill`` has enough rows and blocks; none if that would not suffice.

        ``reserve`` maps the number of sequences that run beside it to the number of blocks that must stay free. Returns the preempted sequences.
        """
        kv_cache, running, priority = self._kv_cache, self._running, prefill.order[0]
        computed = kv_cache.get_computed_blocks(prefill)
        num_new = kv_cache.num_new_blocks(prefill, computed)
        kv_cache.free(computed)
        victims = [owner for owner in running.block_owners if owner.order[0] > priority]
        num_rows = sum(len(victim.rows) if isinstance(victim, Prefill) else 1 for victim in victims)
        num_blocks = kv_cache.num_freed_blocks(victim.blocks for victim in victims)
        num_others = len(running) - sum(isinstance(victim, Sequence) for victim in victims)

        def has_room(more_rows: int, more_blocks: int, num_running: int) -> bool:
            has_rows = more_rows + len(running.free_rows) >= len(prefill.sequences)
            return has_rows and more_blocks + kv_cache.num_free_blocks >= num_new + reserve(num_running)

        names: list[SequenceId] = []
        if has_room(num_rows, num_blocks, num_others):
            while not has_room(0, 0, len(running)) and (more := self.preempt_one(above=priority)):
                names += more
        return names

    def preempt_one(self, above: int | None = None) -> list[SequenceId]:
        """Preempts one owner of blocks and returns its sequences, an empty list if there is none. ``above``: considers only owners with a
        greater priority value."""
        victim = min(
            (owner for owner in self._running.block_owners if above is None or owner.order[0] > above),
            key=lambda v: (-v.order[0], self._kv_cache.num_exclusive_tokens(v.blocks), tuple(-part for part in v.order)),
            default=None,
        )
        if victim is None:
            return []
        if isinstance(victim, Prefill):
            return self._preempt_prefill(victim, Transition.RECOMPUTE)
        self._running.read_back([victim])
        states, host_blocks = self._kv_cache.states, self._swap_out(victim)
        host_row = states.swap_out(victim) if states is not None and host_blocks else -1
        return self._preempt_decoding(
            [victim], Transition.SWAP_OUT if host_blocks else Transition.RECOMPUTE, host_blocks=host_blocks, host_row=host_row
        )

    def preempt_all(self, why: Transition) -> list[SequenceId]:
        """Preempts all sequences that own blocks and drops what is swapped out: all keys and values become invalid."""
        names = self._preempt_decoding(list(self._running.by_row.values()), why, keep_cache=False)
        if self._running.prefilling is not None:
            names += self._preempt_prefill(self._running.prefilling, why)
        self.drop_swapped()
        return names

    def drop_swapped(self, is_void: Callable[[Prefill], bool] = lambda _: True) -> None:
        """Frees the host blocks of waiting prefills for which ``is_void`` is true. Unless aborted, they are recomputed."""
        if self._kv_cache.host_pool.num_free_blocks < self._kv_cache.host_pool.num_blocks:
            for prefill in self._waiting:
                if prefill.host_blocks and is_void(prefill):
                    self._kv_cache.free_host_blocks(prefill)

    def take_swap_outs(self) -> tuple[BlockCopy, ...]:
        """Removes and returns ``swap_outs``."""
        swap_outs, self.swap_outs = tuple(self.swap_outs), []
        return swap_outs

    def _swap_out(self, sequence: Sequence) -> list[int]:
        """Returns the host blocks to which the step copies the computed tokens of ``sequence``; empty if they are recomputed instead."""
        kv_cache, computed = self._kv_cache, sequence.num_known_tokens - 1
        num_blocks = sum(block != NULL_BLOCK for block in sequence.blocks[: blocks_for(computed)])
        num_lost = kv_cache.num_exclusive_tokens(sequence.blocks)
        if kv_cache.states is not None and not kv_cache.states.free_host_rows:
            return []
        if not self.policy.swaps(num_blocks, kv_cache.host_pool.num_free_blocks, computed, num_lost):
            return []
        host_blocks, copies = kv_cache.swap_out(sequence.blocks, computed)
        self.swap_outs += copies
        return host_blocks

    def _preempt_decoding(
        self, sequences: list[Sequence], why: Transition, keep_cache: bool = True, host_blocks: list[int] | None = None, host_row: int = -1
    ) -> list[SequenceId]:
        self._running.read_back(sequences)
        self._running.leave(sequences, keep_cache)
        for sequence in sequences:
            sequence.is_mixed = sequence.is_mixed and bool(host_blocks)
            self._requeue(Prefill([sequence], sequence.known_tokens, host_blocks=list(host_blocks or ()), host_row=host_row), why)
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
            sequence.num_preemptions += 1
            sequence.request.preempted(sequence.index, why)
        self._waiting.push_preempted(prefill)
