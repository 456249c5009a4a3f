"""What is predicted of Tandem's own trainer on a GPU beside what an H200 measured (``benchmarks/results/training-gpu-2026-11-27.md``): a model of 1.24B
parameters, 16 sequences of 4,096 tokens a step, four at once."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.load import hardware_of_device
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
