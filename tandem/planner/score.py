"""Scores a layout: the time, the memory and the cost of its training step. Imports no torch."""

import functools
from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.rank_memory import RankMemory, predict_rank_memory
from tandem.estimate.training.step_time import StepTime
from tandem.layout.flops import step_flops
from tandem.layout.shapes import ModelShapes
from tandem.planner.request import SAFE_SHARE


@dataclass(frozen=True, slots=True)
class Score:
    """What a training step of ``layout`` takes. Throughput and utilisation count the operations of the model alone, as the literature does: 6 a parameter and
    token and 12 L H Q T for attention, without recomputation (``layout.flops``)."""

    shapes: ModelShapes
    layout: TrainingLayout
    hardware: Hardware
    time: StepTime
    memory: RankMemory

    @property
    def step_seconds(self) -> float:
        return self.time.seconds

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.layout.global_batch * self.layout.sequence

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_seconds / self.layout.gpus

    @property
    def model_tflops_per_gpu(self) -> float:
        flops = self.layout.global_batch * sequence_flops(self.shapes, self.layout.sequence, self.layout.trainer is not None)
        return flops / self.step_seconds / self.layout.gpus / 1e12

    @property
    def mfu_percent(self) -> float:
        return 100e12 * self.model_tflops_per_gpu / self.hardware.peak_flops[self.layout.precision]

    @property
    def bubble_fraction(self) -> float:
        """The bubble over the time of the passes: (p - 1) / (v m), equation 1 of Narayanan et al. (2021)."""
        parallel = self.layout.parallel
        return (parallel.pipeline - 1) / (parallel.virtual_stages * self.layout.micro_batches)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.hardware.memory_bytes

    @property
    def fits_safely(self) -> bool:
        """Whether it would still fit if the prediction were a little too low."""
        return self.memory.total <= SAFE_SHARE * self.hardware.memory_bytes

    @property
    def dollars_per_billion_tokens(self) -> float:
        """0 where the price of the GPU is unknown."""
        return self.hardware.price_per_hour / 3600 / self.tokens_per_s_per_gpu * 1e9


@functools.cache
def sequence_flops(shapes: ModelShapes, sequence: int, absorbed: bool) -> int:
    """Returns the operations of the model for one sequence. ``absorbed``: as in ``step_flops``."""
    return step_flops(shapes, [sequence], absorbed=absorbed)


def score(shapes: ModelShapes, layout: TrainingLayout, hardware: Hardware) -> Score:
    """Returns the score of a layout that exists (``check_training_layout``)."""
    return Score(shapes, layout, hardware, predict_step_time(shapes, layout, hardware), predict_rank_memory(shapes, layout))
