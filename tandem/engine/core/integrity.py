"""Checks that the state of the scheduler is consistent."""

from collections import Counter

from tandem.engine.core.lifecycle import State
from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Scheduler
from tandem.engine.kv_cache.block_pool import NULL_BLOCK


def sequences_of(scheduler: Scheduler) -> list[Sequence]:
    """Returns every sequence that waits, is prefilled or decodes."""
    waiting = [prefill.sequences for prefill in scheduler.waiting if not prefill.is_void]
    prefilling = [] if scheduler.running.prefilling is None else [scheduler.running.prefilling.sequences]
    return [sequence for group in waiting + prefilling for sequence in group] + list(scheduler.running.by_row.values())


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises ``AssertionError`` unless the reference counts of blocks and host blocks equal their entries in block tables, each row is free
    or held once, and every sequence is in the collection of its state."""
    running, held, kv_cache = scheduler.running, scheduler.batching.held, scheduler.kv_cache
    prefilling = running.prefilling
    tables = [sequence.blocks for sequence in running.by_row.values()] + [table for _, table in held]
    rows = [*running.free_rows, *running.by_row, *(row for row, _ in held)]
    if prefilling is not None:
        tables.append(prefilling.blocks)
        rows += prefilling.rows
    kv_cache.block_pool.check_integrity(Counter(block for table in tables for block in table if block != NULL_BLOCK))
    swapped = Counter(block for prefill in scheduler.waiting for block in prefill.host_blocks if block != NULL_BLOCK)
    assert all(count == 1 for count in swapped.values()), "a host block is held twice"
    kv_cache.host_pool.check_integrity(swapped)
    if kv_cache.states is not None:
        snapshots = [sequence.snapshot_row for sequence in running.by_row.values() if sequence.snapshot_row >= 0]
        host_rows = [prefill.host_row for prefill in scheduler.waiting if prefill.host_blocks]
        kv_cache.states.check_integrity(snapshots, host_rows, kv_cache.block_pool.cached_hashes())
    assert sorted(rows) == list(range(scheduler.config.max_num_seqs)), "a row is lost or held twice"
    assert not scheduler.preemption.swap_outs, "a swap-out is in no step"
    for row, sequence in running.by_row.items():
        assert sequence.row == row and sequence.state is State.DECODING, "a row and its sequence disagree"
        assert (row in running.speculating) == bool(sequence.request.draft_tokens), "a row and its request disagree on draft tokens"
    assert running.speculating.keys() <= running.by_row.keys(), "a speculating row does not decode"
    for sequence in prefilling.sequences if prefilling is not None else ():
        assert sequence.row < 0 and sequence.state is State.PREFILLING, f"a sequence under prefill is {sequence.state}"
    for prefill in scheduler.waiting:
        for sequence in () if prefill.is_void else prefill.sequences:
            assert sequence.row < 0 and not sequence.blocks, "a waiting sequence holds blocks"
            assert sequence.state in (State.WAITING, State.PREEMPTED), f"a waiting sequence is {sequence.state}"
