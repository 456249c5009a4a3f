"""The latency of an engine under load beside the engine's own scheduler, and where requests are alone."""

import pytest

from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.serving.engine_memory import predict_engine_memory
from tandem.estimate.serving.latency import Traffic, predict_latency
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import predict_decode_step, predict_prefill, predict_step
from tandem.estimate.serving.throughput import predict_saturated, written_tokens
from tandem.layout.shapes import ModelShapes
from tandem.planner.serving.arrivals import draw_arrivals_of
from tandem.planner.serving.simulator import SimulatedEngine, simulate

LLAMA_3_8B = ModelShapes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, False)
H100 = load_hardware("H100-80GB")
LAYOUT = ServingLayout(max_model_len=8192)
PROMPTS, OUTPUTS = Lengths.around(600), Lengths.around(60)


@pytest.mark.parametrize("load", [0.6, pytest.param(0.3, marks=pytest.mark.full), pytest.param(0.8, marks=pytest.mark.full)])
def test_percentiles_are_those_of_the_engine_s_own_scheduler(load: float) -> None:
    full = predict_saturated(LLAMA_3_8B, LAYOUT, H100, PROMPTS.mean, OUTPUTS.mean, variation=OUTPUTS.variation)
    traffic = Traffic(load * full.requests_per_s, PROMPTS, OUTPUTS)
    latency = predict_latency(LLAMA_3_8B, LAYOUT, H100, traffic)
    assert latency is not None
    engine = SimulatedEngine(predict_engine_memory(LLAMA_3_8B, LAYOUT, H100).num_blocks, LAYOUT.max_num_seqs, LAYOUT.max_num_batched_tokens)
    arrivals = draw_arrivals_of(traffic.requests_per_s, PROMPTS, OUTPUTS, 800, seed=1)
    run = simulate(arrivals, engine, lambda step: predict_step(LLAMA_3_8B, LAYOUT, H100, step).seconds)
    for share, allowed in ((0.5, 0.2), (0.95, 0.25)):
        assert latency.first_token_s(share) == pytest.approx(run.quantile("time_to_first_token_s", share), rel=allowed)
        assert latency.output_token_s(share) == pytest.approx(run.quantile("time_per_output_token_s", share), rel=allowed)


def test_a_request_that_is_alone_takes_its_prompt_and_steps_of_its_own() -> None:
    equal = Traffic(0.01, Lengths.around(1000, 0), Lengths.around(100, 0))
    latency = predict_latency(LLAMA_3_8B, LAYOUT, H100, equal)
    assert latency is not None
    assert latency.first_token_s(0.5) == pytest.approx(predict_prefill(LLAMA_3_8B, LAYOUT, H100, 1000), rel=0.05)
    step = predict_decode_step(LLAMA_3_8B, LAYOUT, H100, 1, 1000 + written_tokens(100)).seconds
    assert latency.output_token_s(0.5) == pytest.approx(step, rel=0.01)


def test_more_requests_than_an_engine_completes_have_no_latency() -> None:
    full = predict_saturated(LLAMA_3_8B, LAYOUT, H100, PROMPTS.mean, OUTPUTS.mean, variation=OUTPUTS.variation)
    assert predict_latency(LLAMA_3_8B, LAYOUT, H100, Traffic(1.01 * full.requests_per_s, PROMPTS, OUTPUTS)) is None


def test_long_outputs_are_over_represented_among_those_that_run() -> None:
    # Two outputs, 10 and 90: of the running ones 9 in 10 are long, which have written 45 on average, and 1 in 10 short ones 5.
    outputs = Lengths.of([10, 90])
    assert written_tokens(outputs.mean, outputs.variation) == pytest.approx(0.9 * 45 + 0.1 * 5)
