"""Who may join those that run: the switch between static, dynamic and continuous batching.

A static or a dynamic batch forms while somebody waits and rows and blocks last, over as many steps as its prefills take; from then on
it is closed until nobody of it is left.
"""

from tandem.engine.core.lifecycle import State
from tandem.engine.core.request import Prefill
from tandem.engine.core.state import PauseMode, SchedulerState


def may_join(state: SchedulerState, prefill: Prefill) -> bool:
    """Whether ``prefill``, which goes first, may be admitted now as far as batches and pauses go."""
    has_begun = prefill.sequences[0].state is State.PREEMPTED
    settle(state)
    if state.pause is not None and not (state.pause is PauseMode.WAIT and has_begun):
        return False
    if state.limits.joins in ("continuous", "chunked") or has_begun:
        return True
    if not (state.decoding or state.prefilling or state.ended):
        state.is_forming = True
    return state.is_forming


def close(state: SchedulerState) -> None:
    """Nobody else could be admitted: the batch is what it is."""
    state.is_forming = not (state.decoding or state.prefilling)


def give_back(state: SchedulerState, row: int, table: list[int]) -> None:
    """Take back what an ended sequence held: at once, or with the last one of a static batch."""
    if state.limits.joins == "static" and state.decoding:
        state.ended.append((row, table))
    else:
        state.allocator.release_all(table)
        state.free_rows.append(row)


def settle(state: SchedulerState) -> None:
    """Where the last sequence of a static batch has ended, take back what the batch holds."""
    if state.ended and not (state.decoding or state.prefilling):
        free_ended(state)


def free_ended(state: SchedulerState) -> None:
    """Take back what the ended sequences of a static batch hold, since it is over or short of blocks."""
    for row, table in state.ended:
        state.allocator.release_all(table)
        state.free_rows.append(row)
    state.ended.clear()
