"""Whether everything the scheduler knows agrees with everything else."""

from collections import Counter

from tandem.engine.core.lifecycle import State
from tandem.engine.core.request import Sequence
from tandem.engine.core.state import SchedulerState
from tandem.engine.kv_cache.block_table import RELEASED


def sequences_of(state: SchedulerState) -> list[Sequence]:
    """Every sequence that waits, is prefilled or decodes."""
    waiting = [entry.sequences for _, entry in state.waiting if not entry.sequences[0].is_done]
    under_way = [] if state.prefilling is None else [state.prefilling.sequences]
    return [sequence for group in waiting + under_way for sequence in group] + list(state.decoding.values())


def check_state(state: SchedulerState) -> None:
    """Raise ``AssertionError`` unless each block, row and block of the swap space is held by exactly those that say so, and every
    sequence stands where its state says."""
    tables = [sequence.blocks for sequence in state.decoding.values()] + [table for _, table in state.ended]
    rows = [*state.free_rows, *state.decoding, *(row for row, _ in state.ended)]
    if state.prefilling is not None:
        tables.append(state.prefilling.blocks)
        rows += state.prefilling.rows
    state.allocator.check_integrity(Counter(block for table in tables for block in table if block != RELEASED))
    swapped = Counter(block for _, entry in state.waiting for block in entry.host_blocks if block != RELEASED)
    assert all(count == 1 for count in swapped.values()), "a block of the swap space is held twice"
    state.host.check_integrity(swapped)
    assert sorted(rows) == list(range(state.limits.max_num_seqs)), "a row is lost or held twice"
    assert not state.swap_outs, "a swap was decided and not handed out"
    for row, sequence in state.decoding.items():
        assert sequence.row == row and sequence.state is State.DECODING, "a row and its sequence disagree"
        assert (row in state.speculating) == bool(sequence.request.draft_tokens), "a row speculates that should not, or the other way"
    assert state.speculating.keys() <= state.decoding.keys(), "a row speculates that does not decode"
    for sequence in state.prefilling.sequences if state.prefilling is not None else ():
        assert sequence.row < 0 and sequence.state is State.PREFILLING, "a sequence under prefill is somewhere else"
    for _, entry in state.waiting:
        for sequence in () if entry.sequences[0].is_done else entry.sequences:
            assert sequence.row < 0 and not sequence.blocks, "a sequence that waits holds blocks"
            assert sequence.state in (State.WAITING, State.PREEMPTED), f"a sequence that waits is {sequence.state}"
