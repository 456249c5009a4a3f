"""Blocks for sequences that decode: one every ``BLOCK_TOKENS`` tokens, and one of their own after a fork."""

from collections import Counter

from tandem.engine.core import batches, preemption
from tandem.engine.core.request import Sequence
from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import BlockChange, BlockCopy, make_writable, needs_block, release_behind
from tandem.kernels.api import BLOCK_TOKENS


def give_blocks(state: SchedulerState) -> tuple[list[BlockChange], list[BlockCopy], list[tuple[str, int]]]:
    """Give every sequence that needs a block in this step one of its own; a change is noted for whoever comes to another block. Where
    there are too few, sequences are preempted first, so that nobody who was given one is preempted after it."""
    changes: list[BlockChange] = []
    copies: list[BlockCopy] = []
    preempted: list[tuple[str, int]] = []
    due = _due(state)
    needy = [s for s in due if _needs_block(state, s)]
    while _demand(state, needy) > state.allocator.free_count:
        if state.ended:
            batches.free_ended(state)
        else:
            names = preemption.preempt_one(state)
            assert names, "no blocks are left and nobody holds any"
            preempted += names
        needy = [s for s in needy if s.row >= 0 and _needs_block(state, s)]
    for sequence in due:
        if sequence.row < 0:
            continue
        position = sequence.offset + state.step
        # The last of those that share a block may have it to itself by now.
        if _needs_block(state, sequence):
            column, block, copy = make_writable(state.allocator, sequence.blocks, position)
            changes.append(BlockChange(sequence.row, column, block))
            if copy is not None:
                copies.append(copy)
        elif position % BLOCK_TOKENS == 0:
            # A block that it has held for a while, and comes to now.
            column = position // BLOCK_TOKENS
            changes.append(BlockChange(sequence.row, column, sequence.blocks[column]))
        if sequence.row not in state.speculating:
            sequence.due = state.step + BLOCK_TOKENS - position % BLOCK_TOKENS
            state.due.setdefault(sequence.due, []).append(sequence)
    return changes, copies, preempted


def _due(state: SchedulerState) -> list[Sequence]:
    """The sequences that may need a block in this step; what lies behind their windows is given back."""
    due = [s for s in state.due.pop(state.step, ()) if s.row >= 0 and s.due == state.step]
    due = list(dict.fromkeys([*due, *state.speculating.values()]))
    if state.limits.window and not state.limits.reservation:
        for sequence in due:
            release_behind(state.allocator, sequence.blocks, max(0, sequence.offset + state.step - state.limits.window + 1))
    return due


def _needs_block(state: SchedulerState, sequence: Sequence) -> bool:
    return needs_block(state.allocator, sequence.blocks, sequence.offset + state.step)


def _demand(state: SchedulerState, needy: list[Sequence]) -> int:
    """Blocks that ``needy`` need together: the last holder of a shared block keeps it."""
    shared: Counter[int] = Counter()
    missing = 0
    for sequence in needy:
        column = (sequence.offset + state.step) // BLOCK_TOKENS
        if column == len(sequence.blocks):
            missing += 1
        else:
            shared[sequence.blocks[column]] += 1
    return missing + sum(min(count, state.allocator.references(block) - 1) for block, count in shared.items())
