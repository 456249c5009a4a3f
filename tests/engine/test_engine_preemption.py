"""Preemption: which sequences are preempted, how, and at what cost; decisions as plain values, and memory pressure."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from scheduler_bench import SchedulerBench

from tandem.engine.core.lifecycle import State, Transition
from tandem.engine.core.preemption import PreemptionCostMeter, PreemptionCosts, PreemptionPolicy
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import SchedulerConfig
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.kv_cache.block_pool import BlockCopy
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError


class Bench(SchedulerBench):
    """A scheduler with ``blocks`` blocks and ``host`` ones in host memory."""

    def __init__(
        self, blocks: int, host: int = 0, seqs: int = 4, budget: int = 64, cache: bool = False, costs: PreemptionCosts | None = None,
        watermark: int = 0,
    ) -> None:
        kv_cache = KVCacheManager(blocks, enable_prefix_caching=cache, num_host_blocks=host)
        policy = PreemptionPolicy("auto" if costs else "swap" if host else "recompute", lambda: costs)
        super().__init__(SchedulerConfig(seqs, budget, watermark_blocks=watermark), kv_cache, policy)

    def add(self, name: str, length: int, priority: int = 0, longest: int = 96) -> Sequence:
        tokens = [100 * self.arrivals + i for i in range(length)]
        request = Request(name, None, tokens, SamplingParams(), 0, 0, self.arrivals, priority=priority, max_length=longest)
        self.arrivals += 1
        sequence = Sequence(request, 0, 0)
        self.scheduler.add_group([sequence])
        return sequence

    def until_preempted(self) -> SchedulerOutput:
        while not (output := self.step()).preempted:
            pass
        return output


def test_the_lowest_priority_gives_way_first_whatever_it_loses() -> None:
    bench = Bench(blocks=9, budget=128)
    bench.add("urgent", 14, priority=-1)
    bench.add("patient", 60, priority=1)
    bench.add("normal", 14)
    assert bench.until_preempted().preempted == (("patient", 0),)


def test_among_equals_the_least_work_is_lost() -> None:
    bench = Bench(blocks=7)
    bench.add("short", 14)
    bench.add("long", 62)
    assert bench.until_preempted().preempted == (("short", 0),)
    bench = Bench(blocks=7)
    bench.add("long", 62)
    bench.add("short", 14)
    assert bench.until_preempted().preempted == (("short", 0),)


def test_an_urgent_arrival_takes_the_place_of_less_urgent_ones() -> None:
    bench = Bench(blocks=16, seqs=2)
    bench.add("a", 20, priority=1)
    bench.add("b", 40, priority=1)
    bench.step()
    bench.add("equal", 20, priority=1)
    assert not bench.step().preempted
    bench.add("urgent", 20)
    output = bench.step()
    assert output.preempted == (("a", 0),) and not output.prefills
    assert [chunk.request_id for chunk in bench.step().prefills] == ["urgent"]


def test_nobody_gives_way_where_that_would_not_make_room() -> None:
    bench = Bench(blocks=8, seqs=4, budget=128)
    bench.add("mine", 64, priority=0)
    bench.add("other", 10, priority=1)
    bench.step()
    bench.add("urgent", 90, priority=-1)
    first = bench.step()
    # Both have a lower priority and together hold enough blocks.
    assert {name for name, _ in first.preempted} == {"mine", "other"}
    bench = Bench(blocks=8, seqs=4, budget=128)
    bench.add("mine", 64, priority=-1)
    bench.add("other", 10, priority=1)
    bench.step()
    bench.add("urgent", 90, priority=-1)
    assert not bench.step().preempted


def test_a_swap_copies_every_computed_block_out_and_back_and_goes_on_where_it_was() -> None:
    bench = Bench(blocks=6, host=8)
    a, b = bench.add("a", 31), bench.add("b", 30)
    output = bench.until_preempted()
    assert output.preempted == (("b", 0),) and b.state is State.PREEMPTED and not b.blocks
    computed = len(b.known_tokens) - 1
    held = -(-computed // 16)
    assert len({copy.target for copy in output.swap_outs}) == len(output.swap_outs) == held
    taken = {copy.target: copy.source for copy in output.swap_outs}
    assert bench.scheduler.kv_cache.host_pool.num_free_blocks == 8 - held
    while bench.scheduler.running.by_row:
        bench.step()
        if len(a.token_ids) + bench.drawn.get(a, 0) >= 60:
            bench.finish(a)
    back = bench.step()
    assert back.resumed_rows == (b.row,) and not back.prefills and b.state is State.DECODING
    assert back.swap_ins == tuple(BlockCopy(host, block) for host, block in zip(taken, b.blocks, strict=False))
    assert bench.scheduler.kv_cache.host_pool.num_free_blocks == 8
    after = bench.step()
    assert after.decode_rows == (b.row,) and b.offset + bench.scheduler.step == computed


def test_blocks_that_are_still_in_the_prefix_cache_are_not_copied_back() -> None:
    bench = Bench(blocks=8, host=8, cache=True)
    a, b = bench.add("a", 31), bench.add("b", 47)
    output = bench.until_preempted()
    (name,) = {name for name, _ in output.preempted}
    victim, other = (a, b) if name == "a" else (b, a)
    bench.finish(other)
    back = bench.step()
    assert back.resumed_rows == (victim.row,) and len(back.swap_ins) < len(output.swap_outs)


def test_without_room_in_host_memory_a_sequence_is_computed_again() -> None:
    bench = Bench(blocks=6, host=1)
    bench.add("a", 31)
    b = bench.add("b", 30)
    assert not bench.until_preempted().swap_outs
    assert bench.scheduler.counts[Transition.RECOMPUTE] == 1 and b.state is State.PREEMPTED
    assert bench.scheduler.kv_cache.host_pool.num_free_blocks == 1


def test_auto_swaps_what_is_dear_to_compute_and_computes_what_is_cheap() -> None:
    for costs, swaps in ((PreemptionCosts(1, 0, 0.1, 5), True), (PreemptionCosts(1, 0, 0.1, 500), False), (PreemptionCosts(0.1, 0, 1, 0), False)):
        bench = Bench(blocks=6, host=8, costs=costs)
        bench.add("a", 31)
        bench.add("b", 30)
        assert bool(bench.until_preempted().swap_outs) == swaps


def test_costs_are_those_that_were_measured() -> None:
    shapes = ModelShapes(
        architecture="llama", vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64,
        max_position_embeddings=64, tie_word_embeddings=True,
    )
    copied: list[int] = []
    meter = PreemptionCostMeter(shapes, 40, lambda blocks: copied.append(blocks) or 3e-4 + 1e-3 * blocks)
    assert meter.costs() is None and not copied
    for seconds in (0.9, 1.1, 0.9, 1.1):
        meter.observe_prefill(1000, seconds)
    costs = meter.costs()
    assert costs is not None
    # A step of 1,000 tokens takes a second; a block is copied in a millisecond each way.
    assert costs.token_s == pytest.approx(1e-3, rel=0.02)
    assert costs.swap_s(16 * 5) == pytest.approx(2 * (3e-4 + 5e-3))
    # Two passes of 10 tokens cost as much as one of 20.
    assert costs.recompute_s(20, 20) == pytest.approx(costs.recompute_s(10, 10) + costs.recompute_s(10, 20))
    # One product of q and k and one of weights and v: two operations for each of 4 x 8 components in two layers.
    parameters = 100 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32) + 32
    assert costs.pair_s / costs.token_s == pytest.approx(4 * 2 * 32 / (2 * parameters))
    meter.observe_prefill(1000, 1.0)
    meter.costs()
    assert len(copied) == 2, "copies are timed once"


@pytest.mark.parametrize("slow", ["copies", "compute"])
def test_an_engine_swaps_where_computing_is_slow_on_its_machine_and_bits_stay(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    prompts = [{"prompt_token_ids": [3 + i] * 20} for i in range(6)]
    params = SamplingParams(max_tokens=70, seed=5, ignore_eos=True)
    expected = [answer.outputs[0] for answer in make_llm().generate(prompts, params)]
    llm = make_llm(kv_cache_tokens=128, swap_space=2**-12, enable_prefix_caching=False)
    runner, measured = llm.engine._runner, []
    own_measure, own_execute = runner.measure_swap, runner.execute_model

    def measure(blocks: int) -> float:
        measured.append(own_measure(blocks))
        return measured[-1] + (5.0 * blocks if slow == "copies" else 0.0)

    def execute(output: SchedulerOutput) -> Any:
        if slow == "compute" and len(output.prefills) == 1:
            time.sleep(0.02)
        return own_execute(output)

    monkeypatch.setattr(llm.engine._components.cost_meter, "_measure_swap", measure)
    monkeypatch.setattr(runner, "execute_model", execute)
    assert [answer.outputs[0] for answer in llm.generate(prompts, params)] == expected
    counts = llm.engine.transitions()
    assert len(measured) == 2 and min(measured) > 0
    chosen, other = (Transition.SWAP_OUT, Transition.RECOMPUTE) if slow == "compute" else (Transition.RECOMPUTE, Transition.SWAP_OUT)
    assert counts[chosen] > 0 and counts[other] == 0


@pytest.mark.parametrize("host", [0, 24])
@pytest.mark.parametrize("watermark", [0, 2])
def test_a_storm_preempts_each_sequence_a_few_times_and_everybody_ends(host: int, watermark: int) -> None:
    """200 sequences that grow from 4 to 200 tokens over blocks for three of them: admitting all that fit at first would cause a preemption
    at nearly every block."""
    rng = random.Random(0)
    bench = Bench(blocks=40, host=host, seqs=32, budget=64, watermark=watermark)
    left = {bench.add(str(i), 4, priority=rng.randrange(2), longest=220): rng.randrange(150, 210) for i in range(200)}
    total = sum(left.values())
    steps = 0
    while left:
        output = bench.step()
        steps += 1
        assert output.has_work or output.preempted, "a step did nothing"
        ended = [s for s in bench.scheduler.running.by_row.values() if len(s.token_ids) + bench.drawn.get(s, 0) >= left[s]]
        bench.finish(*ended)
        for sequence in ended:
            assert sequence.num_preemptions <= 6, "a sequence was preempted over and over"
            del left[sequence]
    preempted = bench.scheduler.counts[Transition.RECOMPUTE] + bench.scheduler.counts[Transition.SWAP_OUT]
    assert 0 < preempted <= 2 * 200
    # 40 blocks hold three whole sequences; more than two ran at a time.
    assert steps < total / 2


def test_swapped_sequences_abort_without_leaving_anything_behind(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm(kv_cache_tokens=128, swap_space=2**-12, preemption_mode="swap").engine
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    for i in range(4):
        engine.add_request(str(i), [3 + i] * 20, params)
    while not engine.transitions()[Transition.SWAP_OUT]:
        engine.step()
    assert engine.counts()[State.PREEMPTED] >= 1
    for i in range(4):
        engine.abort(str(i))
        engine.check_integrity()
    assert sorted(output.request_id for output in engine.step()) == ["0", "1", "2", "3"]
    assert engine._scheduler.kv_cache.host_pool.num_free_blocks == engine._scheduler.kv_cache.host_pool.num_blocks
    assert engine.counts() == {**dict.fromkeys(State, 0), State.COMPLETED: 4}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batching": "magic"}, "batching' is 'magic'"),
        ({"cache_implementation": "linear"}, "cache_implementation' is 'linear'"),
        ({"preemption_mode": "swap"}, "no swap space"),
        ({"preemption_mode": "never"}, "preemption_mode' is 'never'"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"swap_space": -1}, "swap_space is -1"),
        ({"batching": "static"}, "without chunked prefill"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make_llm: Callable[..., LLM], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_llm(**settings)
