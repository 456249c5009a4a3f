"""The kinds of batching and of KV cache: which sequences may join, what is reserved, and the reported statistics."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import Scheduler, SchedulerConfig
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams


class Bench:
    """A scheduler; every decoding row draws token 7 in every step, and a sequence ends with its ``new``-th token."""

    def __init__(self, joins: str, blocks: int = 32, seqs: int = 4, reservation: int = 0) -> None:
        kv_cache = KVCacheManager(blocks, enable_prefix_caching=False, reservation=reservation)
        self.scheduler = Scheduler(SchedulerConfig(seqs, 64, joins), kv_cache, self.read_back)
        self.left: dict[Sequence, int] = {}
        self.arrivals = 0

    def add(self, name: str, length: int, new: int) -> Sequence:
        request = Request(name, None, [1] * length, SamplingParams(), 0, 0, self.arrivals, max_length=length + new)
        self.arrivals += 1
        sequence = Sequence(request, 0, 0)
        self.left[sequence] = new
        self.scheduler.add_group([sequence])
        return sequence

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        for row in output.decode_rows + tuple(row for chunk in output.prefills for row in chunk.rows):
            self.left[self.scheduler.running.by_row[row]] -= 1
        ended = [s for s in self.scheduler.running.by_row.values() if not self.left[s]]
        for sequence in ended:
            sequence.token_ids = [7] * (sequence.request.max_length - len(sequence.request.prompt_token_ids))
        self.scheduler.finish(ended)
        for sequence in ended:
            move(sequence, Transition.STOP, self.scheduler.counts)
        return output

    def read_back(self, sequences: list[Sequence]) -> None:
        pass


def prefills(bench: Bench, steps: int) -> list[list[str]]:
    """Returns the requests with a prefill in each of the next steps."""
    return [[chunk.request_id for chunk in bench.step().prefills] for _ in range(steps)]


def test_a_static_batch_keeps_rows_and_blocks_until_its_last_sequence_ends() -> None:
    bench = Bench("static", seqs=2)
    bench.add("short", 16, new=2)
    bench.add("long", 16, new=5)
    bench.add("next", 16, new=1)
    assert prefills(bench, 1) == [["short", "long"]]
    bench.step()
    assert [row for row, _ in bench.scheduler.batching.held] == [0] and not bench.scheduler.running.free_rows
    assert bench.scheduler.kv_cache.block_pool.num_free_blocks == 32 - 4
    assert prefills(bench, 4) == [[], [], [], ["next"]]
    assert not bench.scheduler.batching.held


def test_a_dynamic_batch_gives_back_what_has_ended_and_takes_nobody_in() -> None:
    bench = Bench("dynamic", seqs=3)
    bench.add("short", 16, new=2)
    bench.add("long", 16, new=5)
    assert prefills(bench, 2) == [["short", "long"], []]
    assert len(bench.scheduler.running.free_rows) == 2
    bench.add("next", 16, new=1)
    bench.add("after", 16, new=1)
    assert prefills(bench, 4) == [[], [], [], ["next", "after"]]


def test_continuous_batching_takes_whoever_fits_whole_and_chunked_cuts() -> None:
    for joins, expected in (("continuous", [["a"], ["b"]]), ("chunked", [["a", "b"], ["b"]])):
        bench = Bench(joins)
        bench.add("a", 40, new=2)
        bench.add("b", 60, new=9)
        assert prefills(bench, 2) == expected


def test_a_static_reservation_is_one_run_of_blocks_for_the_longest_sequence() -> None:
    bench = Bench("chunked", blocks=11, reservation=4)
    a, b, c = (bench.add(name, 5, new=30) for name in "abc")
    assert prefills(bench, 2) == [["a", "b"], []]
    assert sorted([a.blocks, b.blocks]) == [[0, 1, 2, 3], [4, 5, 6, 7]] and not c.blocks
    while not c.blocks:
        assert not bench.step().block_copies
    assert c.blocks in ([0, 1, 2, 3], [4, 5, 6, 7])


def test_a_run_is_found_among_free_and_cached_blocks_and_only_whole() -> None:
    pool = BlockPool(9)
    blocks = [pool.get_new_block() for _ in range(9)]
    for block in blocks:
        pool.cache_block(block, bytes([block]))
    for block in (0, 1, 3, 4, 5, 8):
        pool.free_block(block)
    assert pool.get_contiguous_blocks(3) == [3, 4, 5]
    assert pool.get_contiguous_blocks(3) is None
    assert pool.get_cached_block(bytes([4])) is None and pool.get_cached_block(bytes([1])) == 1
    pool.check_integrity({2: 1, 6: 1, 7: 1, 3: 1, 4: 1, 5: 1, 1: 1})


def test_what_lies_behind_a_window_is_given_back_once_and_stays_findable() -> None:
    kv_cache = KVCacheManager(4, window=1)
    pool = kv_cache.block_pool
    table = [pool.get_new_block() for _ in range(4)]
    pool.cache_block(table[0], b"first")
    first, second = table[:2]
    kv_cache.remove_skipped_blocks(table, 31)
    assert table[:2] == [NULL_BLOCK, second] and pool.num_free_blocks == 1
    kv_cache.remove_skipped_blocks(table, 32)
    kv_cache.remove_skipped_blocks(table, 32)
    assert table[:2] == [NULL_BLOCK, NULL_BLOCK] and pool.num_free_blocks == 2
    assert pool.get_cached_block(b"first") == first
    kv_cache.free(table)
    pool.check_integrity({first: 1})


def run(make_llm: Callable[..., LLM], **settings: Any) -> LLM:
    """Two sequences of 16 + 33 and 32 + 17 tokens: both compute 48 tokens, and 16 more steps follow."""
    llm = make_llm(max_num_batched_tokens=128, enable_prefix_caching=False, **settings)
    params = [SamplingParams(max_tokens=new, ignore_eos=True) for new in (33, 17)]
    llm.generate([{"prompt_token_ids": [5] * 16}, {"prompt_token_ids": [6] * 32}], params)
    return llm


def test_figures_count_what_was_computed_drawn_and_padded(make_llm: Callable[..., LLM]) -> None:
    figures = run(make_llm).engine.cumulative_stats()
    assert (figures.steps, figures.computed_tokens, figures.drawn_tokens, figures.padding_tokens) == (33, 96, 50, 0)
    assert len(figures.first_token_s) == 2 and 0 < max(figures.first_token_s) <= figures.busy_s
    # The short prompt is padded by 16; from step 18 on the row of the other one is wasted.
    static = run(make_llm, batching="static").engine.cumulative_stats()
    assert (static.steps, static.computed_tokens, static.padding_tokens) == (33, 96, 16 + 16)
    assert static.padding == pytest.approx(32 / 128)


def test_figures_of_waste_follow_from_block_and_sequence_lengths(make_llm: Callable[..., LLM]) -> None:
    def tokens(step: int) -> list[int]:
        return [15 + step] + ([31 + step] if step <= 17 else [])

    sampled = [tokens(step) for step in range(4, 34, 4)]
    held = sum(16 * -(-length // 16) for lengths in sampled for length in lengths)
    figures = run(make_llm).engine.cumulative_stats()
    assert (figures.kv_slots, figures.kv_unused) == (held, held - sum(map(sum, sampled)))
    reserved = sum(128 * len(lengths) for lengths in sampled)
    figures = run(make_llm, cache_implementation="static").engine.cumulative_stats()
    assert (figures.kv_slots, figures.kv_unused) == (reserved, reserved - sum(map(sum, sampled)))
