"""The scheduler: decides which tokens the next step computes, and in which blocks. Plain Python without tensors."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.preemption import Preemption, PreemptionPolicy
from tandem.engine.core.prefill_budget import PrefillBudget
from tandem.engine.core.request import Prefill, RequestQueue, Sequence
from tandem.engine.core.running import BatchingPolicy, RunningSequences
from tandem.engine.core.scheduler_output import ScheduledPrefill, SchedulerOutput, SequenceId
from tandem.engine.kv_cache.block_pool import BlockChange, BlockCopy, blocks_for
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.kv_cache.state_rows import StateCopies
from tandem.engine.spec_decode.draft_switch import DraftSwitch
from tandem.engine.spec_decode.step_costs import StepCosts
from tandem.types.kv_cache import BLOCK_TOKENS


class PauseMode(StrEnum):
    """What happens to running requests while an engine is paused. ``ABORT``: they are aborted. ``WAIT``: they finish, and no other is
    admitted. ``RECOMPUTE``: they stop, and their keys and values are recomputed if the weights change. ``KEEP``: they stop, and resume with
    their old keys and values."""

    ABORT = "abort"
    WAIT = "wait"
    RECOMPUTE = "recompute"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_seqs``: rows, that is the maximum number of sequences that decode at once. ``max_num_batched_tokens``: the token budget of
    one step, at least ``max_num_seqs``, so that every decoding sequence advances in every step. ``batching``: a kind of ``BatchingPolicy``.
    ``watermark_blocks``: blocks that an admission leaves free. ``speculative_batch_limit``: no draft tokens are scheduled while more
    sequences decode. ``max_draft_tokens``: of one step (``None``: as its tokens allow)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    batching: str = "chunked"
    watermark_blocks: int = 0
    speculative_batch_limit: int = 0
    max_draft_tokens: int | None = None


class Scheduler:
    """Schedules sequences over ``kv_cache``. ``read_back`` moves the new tokens of sequences from their rows to their lists. ``step_costs``: what draft
    tokens cost, if that decides how many are fed. ``draft_switch``: whether any are. ``prefill_budget``: limits prompt tokens beside decoding sequences.
    ``counts``: transitions so far."""

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, read_back: Callable[[list[Sequence]], None],
        preemption: PreemptionPolicy | None = None, step_costs: StepCosts | None = None,
        prefill_budget: PrefillBudget | None = None, draft_switch: DraftSwitch | None = None,
    ) -> None:
        self.config = config
        self.step_costs = step_costs
        self.draft_switch = draft_switch
        self.prefill_budget = prefill_budget
        self.kv_cache = kv_cache
        self.batching = BatchingPolicy(config.batching)
        self.waiting = RequestQueue()
        self.running = RunningSequences(config.max_num_seqs, kv_cache, self.batching, read_back)
        self.counts: Counter[Transition] = Counter()
        self.preemption = Preemption(preemption or PreemptionPolicy(), kv_cache, self.running, self.waiting, self.counts)
        self.pause: PauseMode | None = None
        self.step = 0

    def schedule(self) -> SchedulerOutput:
        """Returns the next step: every decoding sequence advances, then prefill chunks fill the rest of the token budget. If blocks or
        rows run out, sequences are preempted, and nothing is admitted in that step."""
        self.step += 1
        running, states = self.running, self.kv_cache.states
        if states is not None:
            states.begin_step()
        self.waiting.requeue(self.counts)
        preempted = self._preempt_lower_priority()
        changes, copies = self._allocate_decode_slots(preempted)
        rows = running.rows
        budget = self.config.max_num_batched_tokens - len(rows)
        num_draft_tokens = self._schedule_drafts(rows, budget, changes)
        budget -= sum(num_draft_tokens)
        limit = None if self.prefill_budget is None else self.prefill_budget.limit(len(rows))
        budget = budget if limit is None else min(budget, limit)
        prefills: list[ScheduledPrefill] = []
        swap_ins: list[BlockCopy] = []
        resumed: list[int] = []
        while budget > 0:
            if running.prefilling is None and not preempted:
                running.prefilling = self._admit(budget)
            prefill = running.prefilling
            if prefill is None:
                break
            if prefill.host_blocks:
                swap_ins += self.kv_cache.swap_in(prefill)
                resumed += prefill.rows
                # The keys and values of its last token were never computed.
                running.start_decoding(prefill, self.step, first_fed=len(prefill.tokens) - 1)
                continue
            prefills.append(self._schedule_chunk(prefill, budget))
            budget -= len(prefills[-1].tokens)
            if prefill.num_computed_tokens == len(prefill.tokens):
                for sequence in prefill.sequences:
                    move(sequence, Transition.JOIN, self.counts)
                    sequence.num_cached_tokens = prefill.num_cached_tokens if sequence.num_cached_tokens < 0 else sequence.num_cached_tokens
                running.start_decoding(prefill, self.step, first_fed=len(prefill.tokens))
        return SchedulerOutput(
            decode_rows=rows, prefills=tuple(prefills), block_changes=tuple(changes), block_copies=tuple(copies), preempted=tuple(preempted),
            swap_outs=self.preemption.take_swap_outs(), swap_ins=tuple(swap_ins), resumed_rows=tuple(resumed), num_draft_tokens=num_draft_tokens,
            state_copies=StateCopies() if states is None else states.take_copies(),
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_group(self, sequences: list[Sequence], is_scored: bool = False) -> None:
        """Queues the prompt that ``sequences`` share, with the tokens that a continued one has already. A group needs all its rows at once, so one with
        more than ``max_num_seqs`` sequences is divided. Contiguous reservations share no blocks. ``is_scored``: as in ``Prefill``."""
        size = 1 if self.kv_cache.reservation else self.config.max_num_seqs
        for first in range(0, len(sequences), size):
            part = sequences[first : first + size]
            self.waiting.push(Prefill(part, part[0].known_tokens, is_scored=is_scored and first == 0))

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Frees the rows and blocks of finished sequences. The caller completes them."""
        ended = list(sequences)
        self.running.read_back(ended)
        self.running.leave(ended, has_ended=True)
        self.running.free_held_when_idle()

    def abort(self, sequences: Collection[Sequence]) -> None:
        """Frees all that the unfinished ``sequences`` of one request hold, in any state. The caller completes them."""
        self.preemption.drop_swapped(lambda prefill: prefill.sequences[0] in sequences)
        prefilling = self.running.prefilling
        if prefilling is not None and prefilling.sequences[0] in sequences:
            self.running.stop_prefill(prefilling)
        self.finish([sequence for sequence in sequences if sequence.row >= 0])

    def accept_drafts(self, row: int, num_proposed: int, num_accepted: int) -> None:
        """Advances ``row`` by ``num_accepted`` draft tokens, in addition to the one token of the step."""
        sequence = self.running.speculating.get(row)
        if sequence is not None and sequence.draft is not None:
            if num_accepted:
                sequence.offset += num_accepted
                self.running.set_due(sequence, self.step)
            sequence.draft.learn(num_proposed, num_accepted)

    def steps_saved(self, rows: Iterable[int], accepted: Mapping[int, int]) -> float | None:
        """Returns how many plain steps fewer are left, after a step of ``rows`` that has ``accepted`` draft tokens, until the last of them has the length that
        it may reach; ``None`` while others wait for rows. Called before ``accept_drafts``."""
        if self.running.prefilling is not None or self.waiting.peek() is not None:
            return None
        sequences = {row: self.running.by_row[row] for row in rows}
        left = {row: sequence.request.max_length - sequence.offset - self.step for row, sequence in sequences.items()}
        return max(left.values()) - max(tokens - 1 - accepted.get(row, 0) for row, tokens in left.items())

    def may_preempt(self) -> bool:
        """Returns whether the next step may preempt: blocks may run out, or a request of higher priority waits."""
        if self.running.num_due(self.step + 1) > self.kv_cache.num_free_blocks:
            return True
        first = self.waiting.peek()
        return first is not None and self.preemption.outranks(first)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _allocate_decode_slots(self, preempted: list[SequenceId]) -> tuple[list[BlockChange], list[BlockCopy]]:
        """Allocates a slot for the next token of every decoding sequence. If there are too few blocks, first preempts sequences and adds them to
        ``preempted``, so that no sequence is preempted after its allocation."""
        kv_cache, step = self.kv_cache, self.step
        due = self.running.take_due(step)
        if kv_cache.window:
            for sequence in due:
                kv_cache.remove_skipped_blocks(sequence.blocks, sequence.offset + step)
        short = due
        while short := [s for s in short if s.row >= 0 and kv_cache.needs_slot(s.blocks, s.offset + step)]:
            if len(short) <= kv_cache.num_free_blocks or kv_cache.num_blocks_for_slots((s.blocks, s.offset + step) for s in short) <= kv_cache.num_free_blocks:
                break
            if self.batching.held:
                self.running.free_held()
            else:
                names = self.preemption.preempt_one()
                assert names, "no block is free and no sequence holds any"
                preempted += names
        changes: list[BlockChange] = []
        copies: list[BlockCopy] = []
        for sequence in due:
            if sequence.row < 0:
                continue
            position = sequence.offset + step
            # A sequence that shared its block may be its only owner by now, so that it needs no slot.
            slots = kv_cache.allocate_slots(sequence.blocks, position, position + 1)
            assert slots is not None
            for column, block, copy in slots:
                changes.append(BlockChange(sequence.row, column, block))
                copies += [] if copy is None else [copy]
            if not slots and position % BLOCK_TOKENS == 0:
                # It enters a block that was allocated in an earlier step.
                column = position // BLOCK_TOKENS
                changes.append(BlockChange(sequence.row, column, sequence.blocks[column]))
            if kv_cache.states is not None and position % BLOCK_TOKENS == 0:
                kv_cache.states.save(sequence, position)
            self.running.set_due(sequence, step)
        return changes, copies

    def _schedule_drafts(self, rows: tuple[int, ...], budget: int, changes: list[BlockChange]) -> tuple[int, ...]:
        """Returns the number of draft tokens that each of ``rows`` may feed, at most ``budget`` in total; empty if none may. Drafts use only
        blocks beyond one per running sequence, so they never cause a preemption. Adds new blocks to ``changes``."""
        speculating = self.running.speculating
        if not speculating or len(rows) > self.config.speculative_batch_limit:
            return ()
        for measured in (self.step_costs, self.draft_switch):
            if measured is not None and not measured.pays(len(rows)):
                return ()
        budget = budget if self.config.max_draft_tokens is None else min(budget, self.config.max_draft_tokens)
        scheduled = []
        for row in rows:
            sequence = speculating.get(row)
            if sequence is None or sequence.draft is None:
                scheduled.append(0)
                continue
            position = sequence.offset + self.step
            # The step draws one token more than it is proposed.
            count = max(0, min(sequence.draft.next(), sequence.request.max_length - position - 2, budget))
            spare = max(0, self.kv_cache.num_free_blocks - len(self.running))
            count = min(count, (len(sequence.blocks) + spare) * BLOCK_TOKENS - 1 - position)
            for column, block, _ in self.kv_cache.allocate_slots(sequence.blocks, position + 1, position + 1 + count) or ():
                changes.append(BlockChange(row, column, block))
            scheduled.append(count)
            budget -= count
        return tuple(scheduled) if any(scheduled) else ()

    # -- prefills ------------------------------------------------------------------------------------------------------

    def _preempt_lower_priority(self) -> list[SequenceId]:
        """Preempts sequences of lower priority than the first waiting prefill, if it needs their rows or blocks."""
        first = self.waiting.peek()
        if first is None or self.pause is not None or not self.preemption.outranks(first):
            return []
        return self.preemption.preempt_for(first, lambda num_running: self._num_reserved_blocks(first, num_running))

    def _admit(self, budget: int) -> Prefill | None:
        """Admits the first waiting prefill: allocates its rows and all its blocks. Returns ``None`` if they do not suffice."""
        self.running.free_held_when_idle()
        is_idle = not self.running
        prefill = self.waiting.peek()
        if prefill is None or not self._may_begin(prefill, is_idle) or len(prefill.sequences) > len(self.running.free_rows):
            self.batching.close(is_idle)
            return None
        computed = self.kv_cache.get_computed_blocks(prefill)
        is_whole = not self.batching.splits_prompts and not prefill.host_blocks
        if is_whole and len(prefill.tokens) - len(computed) * BLOCK_TOKENS > budget:
            # It waits for the next step's budget; the batch is still forming.
            self.kv_cache.free(computed)
            return None
        if not self.kv_cache.allocate_prompt(prefill, computed, self._num_reserved_blocks(prefill, len(self.running))):
            self.batching.close(is_idle)
            return None
        self.waiting.pop()
        prefill.rows = [self.running.free_rows.pop() for _ in prefill.sequences]
        if self.kv_cache.states is not None and not prefill.host_blocks:
            self.kv_cache.states.load(prefill)
        for sequence in prefill.sequences:
            move(sequence, Transition.SWAP_IN if prefill.host_blocks else Transition.ADMIT, self.counts)
            if sequence.num_preemptions:
                sequence.request.resumed(sequence.index)
        return prefill

    def _may_begin(self, prefill: Prefill, is_idle: bool) -> bool:
        if self.pause is not None and not (self.pause is PauseMode.WAIT and prefill.has_begun):
            return False
        return prefill.has_begun or self.batching.may_join(is_idle)

    def _num_reserved_blocks(self, prefill: Prefill, num_running: int) -> int:
        """Returns the number of blocks that must stay free when ``prefill`` is admitted beside ``num_running`` sequences.

        Every running sequence and every fork may need a block soon; without this reserve the admission would be undone at once. A sequence that
        runs alone needs none. Each preemption of a sequence doubles its reserve, up to its maximum length, so that running sequences finish under
        memory pressure.
        """
        if not num_running or self.kv_cache.reservation:
            return 0
        first = prefill.sequences[0]
        patience = 0
        if first.num_preemptions:
            growth = blocks_for(first.request.max_length) - blocks_for(len(prefill.tokens))
            patience = min((1 << min(first.num_preemptions, 30)) - 1, max(0, growth))
        return num_running + len(prefill.sequences) + self.config.watermark_blocks + patience

    def _schedule_chunk(self, prefill: Prefill, budget: int) -> ScheduledPrefill:
        """Returns the next chunk of ``prefill``, at most ``budget`` tokens. Its full blocks enter the prefix cache at once, since a step writes
        all its keys and values before it reads any."""
        start = prefill.num_computed_tokens
        self.kv_cache.remove_skipped_blocks(prefill.blocks, start)
        tokens = tuple(prefill.tokens[start : start + budget])
        prefill.num_computed_tokens += len(tokens)
        request = prefill.sequences[0].request
        self.kv_cache.cache_blocks(request, prefill.block_hashes, prefill.blocks, prefill.num_computed_tokens)
        states, is_last = self.kv_cache.states, prefill.num_computed_tokens == len(prefill.tokens)
        kept = () if states is None else states.keep(prefill, start, prefill.num_computed_tokens)
        if request.pooling is not None:
            pooled_row = prefill.rows[0] if is_last else -1
            return ScheduledPrefill(request.id, start, tokens, tuple(prefill.blocks), (), request.adapter, pooled_row, prefill.rows[0], kept)
        rows = tuple(prefill.rows) if is_last else ()
        return ScheduledPrefill(request.id, start, tokens, tuple(prefill.blocks), rows, request.adapter, state_row=prefill.rows[0], kept_states=kept)
