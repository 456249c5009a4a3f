"""The output of the scheduler: what one step computes, as plain values."""

from typing import NamedTuple

from tandem.engine.kv_cache.block_pool import BlockChange, BlockCopy
from tandem.engine.kv_cache.state_rows import StateCopies

SequenceId = tuple[str, int]
"""The id of a request and the index of one of its completions."""


class ScheduledPrefill(NamedTuple):
    """A chunk of a prefill: tokens ``start`` to ``start + len(tokens) - 1`` of a prompt, or of a preempted sequence.

    ``blocks``: the block table. ``rows``: in the last chunk, the rows that draw their next token from it (one for each sequence of a group);
    empty before. ``pooled_row``: in the last chunk of a pooling request, the row that it leaves after the step without drawing; else -1. ``adapter``: the
    name of the request's LoRA adapter, empty for none. ``state_row``: the row of the group in every ``StateLayer``: that of its first sequence.
    ``kept_states``: places in the chunk of tokens after which the state is copied to a further row, and these rows.
    """

    request_id: str
    start: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    adapter: str = ""
    pooled_row: int = -1
    state_row: int = 0
    kept_states: tuple[tuple[int, int], ...] = ()


class SchedulerOutput(NamedTuple):
    """One step.

    ``decode_rows``: rows that feed one token each. ``num_draft_tokens``: the maximum number of draft tokens that each of them feeds in
    addition; empty if none does. Before the step computes anything, ``swap_outs`` (to host memory), ``swap_ins`` (from there), ``block_copies``,
    ``state_copies`` and then ``block_changes`` are applied to the caches and the block tables. ``resumed_rows``: rows that are swapped in and decode from the
    next step on. ``preempted``: sequences that lost their blocks.
    """

    decode_rows: tuple[int, ...] = ()
    prefills: tuple[ScheduledPrefill, ...] = ()
    block_changes: tuple[BlockChange, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[SequenceId, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    resumed_rows: tuple[int, ...] = ()
    num_draft_tokens: tuple[int, ...] = ()
    state_copies: StateCopies = StateCopies()

    @property
    def has_work(self) -> bool:
        return bool(self.decode_rows or self.prefills or self.swap_outs or self.resumed_rows)

    @property
    def joined_rows(self) -> tuple[int, ...]:
        """Rows whose last prefill chunk is in this step."""
        return tuple(row for chunk in self.prefills for row in chunk.rows)

    @property
    def pooled_rows(self) -> tuple[int, ...]:
        """Rows of the pooling requests that end with this step."""
        return tuple(chunk.pooled_row for chunk in self.prefills if chunk.pooled_row >= 0)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes, without draft tokens."""
        return len(self.decode_rows) + sum(len(chunk.tokens) for chunk in self.prefills)
