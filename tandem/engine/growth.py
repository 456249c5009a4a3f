"""Blocks for sequences that decode: one every ``BLOCK_TOKENS`` steps, and one of their own after a fork."""

from tandem.engine import preemption
from tandem.engine.block_table import BlockChange, BlockCopy, make_writable, needs_block
from tandem.engine.state import SchedulerState
from tandem.kernels.api import BLOCK_TOKENS


def give_blocks(state: SchedulerState) -> tuple[list[BlockChange], list[BlockCopy], list[tuple[str, int]]]:
    """Give every sequence that needs a block in this step one of its own, and preempt where there is none.

    They are served in order, and the last in order is preempted first: so nobody who was served is preempted after it.
    """
    changes: list[BlockChange] = []
    copies: list[BlockCopy] = []
    preempted: list[tuple[str, int]] = []
    due = [s for s in state.due.pop(state.step, ()) if s.row >= 0 and s.due == state.step]
    if len(due) > state.allocator.free_count:
        due.sort(key=lambda sequence: sequence.order)
    for sequence in due:
        position = sequence.offset + state.step
        while sequence.row >= 0 and needs_block(state.allocator, sequence.blocks, position):
            if state.allocator.free_count:
                column, block, copy = make_writable(state.allocator, sequence.blocks, position)
                changes.append(BlockChange(sequence.row, column, block))
                if copy is not None:
                    copies.append(copy)
            else:
                preempted.extend(preemption.preempt_last(state))
        if sequence.row >= 0:
            sequence.due = state.step + BLOCK_TOKENS - position % BLOCK_TOKENS
            state.due.setdefault(sequence.due, []).append(sequence)
    return changes, copies, preempted
