"""The serving simulator beside the real engine: the same decisions, step by step, and cases worked by hand."""

from dataclasses import replace

import pytest

from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.estimate.serving.step_time import EngineStep
from tandem.kernels import select
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.planner.serving.arrivals import PATTERNS, Arrival, draw_arrivals
from tandem.planner.serving.measured_steps import MeasuredSteps, interpolate
from tandem.planner.serving.simulator import SimulatedEngine, simulate
from tandem.types import UserError

SHAPES = ModelShapes("qwen3", 64, 16, 1, 2, 1, 8, 16, 256, True, qk_norm=True)
Decision = tuple[int, tuple[tuple[str, int, int, bool], ...], tuple[tuple[str, int], ...]]


def decision(output: SchedulerOutput) -> Decision:
    """Returns how many rows decode, each chunk (request, start, tokens, whether it is the last) and who was preempted."""
    chunks = tuple((chunk.request_id, chunk.start, len(chunk.tokens), bool(chunk.rows)) for chunk in output.prefills)
    return len(output.decode_rows), chunks, output.preempted


@pytest.mark.parametrize("admission", ["chunked", *(pytest.param(name, marks=pytest.mark.full) for name in ("static", "dynamic", "continuous"))])
def test_the_simulator_decides_every_step_as_the_engine_does(monkeypatch: pytest.MonkeyPatch, admission: str) -> None:
    options = SimulatedEngine(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=96, admission=admission)
    arrivals = [each._replace(at_s=0.0) for each in draw_arrivals("long_prompts", 24, 1.0, 30, 24, seed=3, longest=96)]
    decoder = Decoder(SHAPES, select("auto"))
    initialise(decoder, 0)
    settings = EngineSettings(96, options.num_blocks, max_num_seqs=6, max_num_batched_tokens=96, admission=admission, watermark=options.watermark)
    engine = Engine(decoder, settings)
    outputs, schedule = list[SchedulerOutput](), engine._scheduler.schedule

    def recorded() -> SchedulerOutput:
        outputs.append(schedule())
        return outputs[-1]

    monkeypatch.setattr(engine._scheduler, "schedule", recorded)
    for number, arrival in enumerate(arrivals):
        # No two prompts have a block in common.
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        engine.add_request(str(number), [number + 1] * arrival.prompt_tokens, params)
    while engine.has_unfinished_requests:
        engine.step()
    simulated = simulate(arrivals, options, lambda step: step.rows, records=True)
    decisions = [decision(output) for output in outputs if output.has_work]
    assert [decision(output) for output in simulated.outputs] == decisions
    assert len(decisions) > 50 and simulated.preemptions == sum(len(preempted) for _, _, preempted in decisions)


LINEAR = LinearAttention((0,), num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8, kernel_size=4)


@pytest.mark.parametrize("snapshots", [1, 4, 24])
def test_the_simulator_finds_prefixes_of_linear_attention_where_the_engine_has_snapshots(monkeypatch: pytest.MonkeyPatch, snapshots: int) -> None:
    options = SimulatedEngine(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=48, state_snapshots=snapshots)
    draws = draw_arrivals("long_prompts", 24, 1.0, 40, 24, seed=3, longest=96)
    arrivals = [each._replace(at_s=0.0, shared_tokens=min(each.prompt_tokens - 1, 32 if n % 3 else 16)) for n, each in enumerate(draws)]
    decoder = Decoder(replace(SHAPES, num_hidden_layers=2, linear_attention=LINEAR), select("auto"))
    initialise(decoder, 0)
    settings = EngineSettings(
        96, options.num_blocks, max_num_seqs=6, max_num_batched_tokens=48, watermark=options.watermark, state_snapshots=snapshots, async_scheduling=False
    )
    engine = Engine(decoder, settings)
    outputs, schedule = list[SchedulerOutput](), engine._scheduler.schedule

    def recorded() -> SchedulerOutput:
        outputs.append(schedule())
        return outputs[-1]

    monkeypatch.setattr(engine._scheduler, "schedule", recorded)
    for number, arrival in enumerate(arrivals):
        prompt = [1] * arrival.shared_tokens + [number + 2] * (arrival.prompt_tokens - arrival.shared_tokens)
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    simulated = simulate(arrivals, options, lambda step: step.rows, records=True)
    assert [decision(output) for output in simulated.outputs] == [decision(output) for output in outputs if output.has_work]
    every_block = simulate(arrivals, replace(options, state_snapshots=None), lambda step: step.rows)
    assert 0 < simulated.cached_prompt_tokens < every_block.cached_prompt_tokens or snapshots == 1


def test_a_prefix_of_linear_attention_is_found_at_a_snapshot_alone() -> None:
    # The first prompt keeps its state after 192 tokens, the second, which leaves it at 160, keeps one there, from which the third goes on.
    arrivals = [Arrival(float(1000 * index), 200, 2, shared_tokens=160) for index in range(3)]
    found = simulate(arrivals, SimulatedEngine(64, state_snapshots=8), lambda step: step.rows)
    assert [request.time_to_first_token_s for request in found.requests] == [200, 200, 40]
    without = simulate(arrivals, SimulatedEngine(64, state_snapshots=0), lambda step: step.rows)
    assert [request.time_to_first_token_s for request in without.requests] == [200, 200, 200]


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    seen: list[EngineStep] = []

    def seconds(step: EngineStep) -> float:
        seen.append(step)
        return 1.0

    found = simulate([Arrival(5.0, 100, 4)], SimulatedEngine(64, max_num_batched_tokens=64), seconds)
    request = found.requests[0]
    assert (request.time_to_first_token_s, request.latency_s, request.time_per_output_token_s) == (2.0, 5.0, 1.0)
    assert seen == [
        EngineStep(0, 0, 64, 32), EngineStep(0, 0, 36, 82), EngineStep(1, 101, 0, 0), EngineStep(1, 102, 0, 0), EngineStep(1, 103, 0, 0)
    ]  # fmt: skip


def test_a_shared_prefix_is_computed_once() -> None:
    arrivals = [Arrival(float(1000 * index), 200, 2, shared_tokens=160) for index in range(3)]
    found = simulate(arrivals, SimulatedEngine(64), lambda step: step.rows)
    assert found.cached_prompt_tokens == 2 * 160
    assert [request.time_to_first_token_s for request in found.requests] == [200, 40, 40]


def test_patterns_have_the_rate_and_lengths_that_were_asked_for() -> None:
    for pattern in PATTERNS:
        arrivals = draw_arrivals(pattern, 4000, 10.0, 200, 50, seed=5)
        assert 4000 / arrivals[-1].at_s == pytest.approx(10, rel=0.15)
        assert sum(each.prompt_tokens for each in arrivals) / 4000 == pytest.approx(200, rel=0.05)
        assert sum(each.output_tokens for each in arrivals) / 4000 == pytest.approx(50, rel=0.05)
    bursty = draw_arrivals("bursty", 64, 10.0, 20, 5)
    assert len({each.at_s for each in bursty}) == 8


def test_measured_steps_are_interpolated_and_the_fixed_cost_of_a_step_counts_once() -> None:
    steps = MeasuredSteps(((1, 3.0), (4, 6.0)), 10, 0.1, ((10, 12.0), (20, 22.0)), 0.01)
    assert interpolate(steps.decode_s, 2) == 4 and interpolate(steps.decode_s, 6) == 8
    assert steps(EngineStep(2, 15)) == pytest.approx(4 + 0.1 * 2 * 5)
    assert steps(EngineStep(prompt_tokens=15, prompt_context=7.5 + 100)) == pytest.approx(17 + 0.01 * 15 * 100)
    assert steps(EngineStep(2, 10, 15, 7.5)) == pytest.approx(4 + 17 - 2)


def test_what_cannot_be_simulated_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="a request has 1,100 tokens and the KV cache 64 blocks; it needs 69"):
        simulate([Arrival(0, 1000, 100)], SimulatedEngine(64), lambda step: 1.0)
    with pytest.raises(UserError, match="raise max_num_batched_tokens, or split prompts"):
        simulate([Arrival(0, 100, 10)], SimulatedEngine(64, max_num_batched_tokens=64, admission="continuous"), lambda step: 1.0)
    with pytest.raises(UserError, match="arrival pattern is 'tidal'"):
        draw_arrivals("tidal", 1, 1.0, 1, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="requests per second are 0"):
        draw_arrivals("steady", 1, 0.0, 1, 1)
