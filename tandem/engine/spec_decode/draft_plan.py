"""Speculation as the scheduler sees it: how many positions a row may feed, in which blocks, and how far it came."""

from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import BlockChange, blocks_for
from tandem.kernels.api import BLOCK_TOKENS


def plan_drafts(state: SchedulerState, rows: tuple[int, ...], budget: int) -> tuple[tuple[int, ...], list[BlockChange]]:
    """For each of ``rows`` the tokens that may be proposed, at most ``budget`` together, and the blocks that they take. Guesses take
    only blocks that nobody else is about to need: they never preempt."""
    changes: list[BlockChange] = []
    if not state.speculating or len(rows) > state.limits.guessing_seqs:
        return (), changes
    planned = []
    for row in rows:
        sequence = state.speculating.get(row)
        if sequence is None or sequence.draft is None:
            planned.append(0)
            continue
        position = sequence.offset + state.step
        # The step draws one token more than was proposed.
        count = max(0, min(sequence.draft.next(), sequence.request.max_length - position - 2, budget))
        spare = state.allocator.free_count - len(state.decoding)
        covered = (len(sequence.blocks) + max(0, spare)) * BLOCK_TOKENS - 1
        count = min(count, covered - position)
        for column in range(len(sequence.blocks), blocks_for(position + count + 1)):
            sequence.blocks.append(state.allocator.allocate())
            changes.append(BlockChange(row, column, sequence.blocks[-1]))
        planned.append(count)
        budget -= count
    return (tuple(planned) if any(planned) else ()), changes


def advance(state: SchedulerState, row: int, proposed: int, accepted: int) -> None:
    """Row ``row`` has fed ``accepted`` tokens more than one in this step."""
    sequence = state.speculating.get(row)
    if sequence is not None and sequence.draft is not None:
        sequence.offset += accepted
        sequence.draft.learn(proposed, accepted)
