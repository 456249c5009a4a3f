"""What is predicted of Tandem's own trainer on a GPU beside what an H200 measured (``benchmarks/results/training-gpu-2026-11-27.md``): a model of 1.24B
parameters, 16 sequences of 4,096 tokens a step, four at once; and of its engine, of which the kernels' shares are those of the 0.6B model, not of the 8B."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.load import hardware_of_device
from tandem.estimate.serving.kernels import PUBLISHED, TANDEM
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import predict_decode_step, predict_prefill
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.shapes import ModelShapes

SHAPES = ModelShapes("llama", 128256, 2048, 16, 32, 8, 64, 8192, 8192, tie_word_embeddings=True, rope_theta=5e5)


@pytest.mark.parametrize(("offload", "measured_s", "measured_gib"), [("none", 1.1966, 43.4), ("cpu", 1.3822, 34.4)])
def test_a_step_and_its_memory_are_within_a_twentieth_of_what_was_measured(offload: Any, measured_s: float, measured_gib: float) -> None:
    hardware = hardware_of_device("NVIDIA H200")
    assert hardware is not None
    config = TrainerConfig(learning_rate=1e-4, precision="bf16", offload=offload)
    layout = layout_of_trainer(config, ParallelConfig(), 4 * 4096, attended=4096, on_cpu=False, micro_batches=4)
    layout = replace(layout, sequence=4096, micro_batch=4, global_batch=16)
    assert predict_step_time(SHAPES, layout, hardware).seconds == pytest.approx(measured_s, rel=0.05)
    memory = predict_rank_memory(SHAPES, layout)
    assert (memory.total - memory.context - memory.fragmentation) / 2**30 == pytest.approx(measured_gib, rel=0.05)


ENGINE = Path(__file__).parents[2] / "benchmarks" / "results" / "engine-gpu-2026-11-27.md"
DECODERS = {
    "0.6B": ModelShapes("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 16384, tie_word_embeddings=True, qk_norm=True),
    "8B": ModelShapes("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 16384, tie_word_embeddings=False, qk_norm=True),
}


def engine_seconds(kernels: str, model: str, what: str) -> float:
    """Returns what is predicted of a line of the measurement: a step at the contexts that it timed, or a prompt."""
    hardware, layout = hardware_of_device("NVIDIA H200"), ServingLayout(kernels=kernels)
    assert hardware is not None
    count = int(what.split()[-1])
    if what.startswith("prefill"):
        return predict_prefill(DECODERS[model], layout, hardware, count)
    return predict_decode_step(DECODERS[model], layout, hardware, count, 1024 + 8 + 64 / 2).seconds


def test_steps_of_the_engine_are_predicted_with_its_own_kernels_and_are_slower_than_published_ones() -> None:
    text = ENGINE.read_text(encoding="utf-8")
    measured = re.findall(r"^\| (\S+) \| ((?:decode, batch|prefill of) \d+) \| ([\d.]+) ms", text, re.MULTILINE)
    assert [(model, what) for model, what, _ in measured] == [
        ("0.6B", "decode, batch 1"), ("0.6B", "decode, batch 64"), ("0.6B", "prefill of 8192"), ("8B", "decode, batch 1"),
    ]  # fmt: skip
    for model, what, milliseconds in measured:
        assert engine_seconds(TANDEM, model, what) == pytest.approx(float(milliseconds) / 1e3, rel=0.03), "the 8B is not what the shares come from"
        assert engine_seconds(PUBLISHED, model, what) < 0.95 * float(milliseconds) / 1e3
