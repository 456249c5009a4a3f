"""Scheduler decisions as plain values; no model runs here."""

import random

import pytest
from scheduler_bench import SchedulerBench

from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import SchedulerConfig
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.kv_cache.block_pool import BlockChange, BlockCopy
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.sample.sampling_params import SamplingParams


class Bench(SchedulerBench):
    def __init__(self, seqs: int = 4, budget: int = 16, blocks: int = 16, chunked: bool = True, cache: bool = True) -> None:
        config = SchedulerConfig(seqs, budget, "chunked" if chunked else "continuous")
        super().__init__(config, KVCacheManager(blocks, enable_prefix_caching=cache))

    def add(self, name: str, length: int, n: int = 1, priority: int = 0, first_token: int = 0) -> list[Sequence]:
        tokens = list(range(first_token, first_token + length))
        request = Request(name, None, tokens, SamplingParams(n=n), 0, 0, self.arrivals, priority=priority)
        self.arrivals += 1
        sequences = [Sequence(request, i, 0) for i in range(n)]
        self.scheduler.add_group(sequences)
        return sequences


def chunks(output: SchedulerOutput) -> list[tuple[str, int, int, tuple[int, ...]]]:
    return [(c.request_id, c.start, len(c.tokens), c.rows) for c in output.prefills]


def test_prefill_fills_the_budget_in_chunks_and_mixes_with_decode() -> None:
    bench = Bench(budget=16)
    bench.add("a", 10)
    bench.add("b", 40)
    assert chunks(bench.step()) == [("a", 0, 10, (0,)), ("b", 0, 6, ())]
    second = bench.step()
    assert second.decode_rows == (0,) and chunks(second) == [("b", 6, 15, ())]
    assert chunks(bench.step()) == [("b", 21, 15, ())]
    assert chunks(bench.step()) == [("b", 36, 4, (1,))]
    assert bench.step().decode_rows == (0, 1)


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    bench = Bench(budget=48, chunked=False)
    a = bench.add("a", 10)
    bench.add("b", 48)
    assert chunks(bench.step()) == [("a", 0, 10, (0,))]
    assert bench.step() == SchedulerOutput(decode_rows=(0,))
    bench.finish(*a)
    assert chunks(bench.step()) == [("b", 0, 48, (0,))]


def test_a_group_is_prefilled_once_and_forks_with_copies_of_the_partial_block() -> None:
    bench = Bench()
    sequences = bench.add("a", 5, n=3)
    first = bench.step()
    assert chunks(first) == [("a", 0, 5, (0, 1, 2))] and len(first.prefills[0].blocks) == 1
    shared = first.prefills[0].blocks[0]
    second = bench.step()
    assert second.decode_rows == (0, 1, 2)
    assert second.block_copies == (BlockCopy(shared, 1), BlockCopy(shared, 2))
    assert second.block_changes == (BlockChange(0, 0, 1), BlockChange(1, 0, 2))
    assert bench.step() == SchedulerOutput(decode_rows=(0, 1, 2))
    bench.finish(*sequences)
    bench.scheduler.kv_cache.block_pool.check_integrity()


def test_a_block_is_given_exactly_when_a_sequence_crosses_into_it() -> None:
    bench = Bench()
    (sequence,) = bench.add("a", 14)
    bench.step()
    given = {step: [change.column for change in bench.step().block_changes] for step in range(14, 50)}
    assert {step: columns for step, columns in given.items() if columns} == {16: [1], 32: [2], 48: [3]}
    assert len(sequence.blocks) == 4


def test_the_same_decode_tuple_is_returned_until_a_sequence_joins_or_leaves() -> None:
    bench = Bench()
    a, b = bench.add("a", 3), bench.add("b", 3)
    bench.step()
    first = bench.step().decode_rows
    assert bench.step().decode_rows is first == (0, 1)
    bench.finish(*a)
    assert bench.step().decode_rows == (1,)
    bench.add("c", 3)
    assert chunks(bench.step())[0][3] == (0,)
    assert bench.step().decode_rows == (1, 0)
    assert b[0].row == 1


def test_lower_priority_values_and_earlier_arrivals_go_first() -> None:
    bench = Bench(seqs=1)
    late, urgent, early = bench.add("late", 3, priority=1), bench.add("urgent", 3, priority=-1), bench.add("early", 3, priority=1)
    order = []
    for group in (urgent, late, early):
        order.append(bench.step().prefills[0].request_id)
        bench.finish(*group)
    assert order == ["urgent", "late", "early"]


def test_the_last_in_order_is_preempted_and_comes_back_with_all_its_tokens() -> None:
    bench = Bench(blocks=6, cache=False)
    a, b = bench.add("a", 31), bench.add("b", 30)
    while not (output := bench.step()).preempted:
        pass
    assert output.preempted == (("b", 0),) and output.decode_rows == (a[0].row,) and not output.prefills
    known = 30 + len(b[0].token_ids)
    assert known > 40 and b[0].row == -1 and b[0].blocks == []
    bench.finish(*a)
    computed = [c for _ in range(-(-known // 16)) for c in bench.step().prefills]
    assert [c.start for c in computed] == list(range(0, known, 16))
    assert [token for c in computed for token in c.tokens] == list(range(30)) + [7] * (known - 30)
    bench.finish(*b)
    bench.scheduler.kv_cache.block_pool.check_integrity()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    bench = Bench(blocks=8, budget=64)
    a = bench.add("a", 31)
    b = bench.add("b", 47, first_token=100)
    while not (output := bench.step()).preempted:
        pass
    assert output.preempted == (("b", 0),)
    bench.finish(*a)
    (chunk,) = bench.step().prefills
    assert (chunk.start, len(chunk.tokens)) == (64, 1) and b[0].num_cached_tokens == 0


def test_equal_prompts_that_arrive_together_share_blocks_within_one_step() -> None:
    bench = Bench(budget=64)
    bench.add("a", 20)
    bench.add("b", 20)
    first, second = bench.step().prefills
    assert (first.start, second.start) == (0, 16) and first.blocks[0] == second.blocks[0]


def test_a_chunk_that_is_not_scheduled_yet_is_not_shared() -> None:
    bench = Bench(seqs=2, budget=20)
    bench.add("a", 64)
    bench.step()
    bench.add("b", 64)
    assert [c.request_id for c in bench.step().prefills] == ["a"]
    assert len(bench.scheduler.kv_cache.get_computed_blocks(bench.scheduler.running.prefilling)) == 2


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_end_with_every_block_and_row_back(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(seqs=5, budget=rng.choice((5, 16, 64)), blocks=rng.choice((6, 9, 30)), cache=rng.random() < 0.5)
    pending: dict[Sequence, int] = {}
    for i in range(25):
        length, n = rng.randrange(1, 60), rng.randrange(1, 5)
        for sequence in bench.add(str(i), length, n, rng.randrange(3), rng.randrange(2)):
            pending[sequence] = rng.randrange(1, 90 - length)
    for _ in range(4000):
        output = bench.step()
        assert len(output.decode_rows) + sum(len(c.tokens) for c in output.prefills) <= bench.scheduler.config.max_num_batched_tokens
        assert len(set(output.decode_rows)) == len(output.decode_rows)
        targets = [copy.target for copy in output.block_copies]
        assert len(set(targets)) == len(targets)
        done = [s for s in bench.scheduler.running.by_row.values() if len(s.token_ids) + bench.drawn.get(s, 0) >= pending[s]]
        bench.finish(*done)
        for sequence in done:
            assert len(sequence.token_ids) == pending.pop(sequence)
        if not pending:
            break
    assert not pending
    bench.scheduler.kv_cache.block_pool.check_integrity()
    assert sorted(bench.scheduler.running.free_rows) == list(range(5))
