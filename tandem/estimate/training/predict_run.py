"""Predicts a run of many steps: what data loading, checkpoints, failures and restarts take beside the steps. Imports no torch.

Failures are those of a published cluster; the expected share of effective training time is Daly's (2006), which tests compare with the simulation of the run.
"""

from dataclasses import dataclass

from tandem.estimate.effective_time import daly_interval_s, expected_share
from tandem.estimate.failures import LLAMA3, FailureRates
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.layout import TrainingLayout
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

CHECKPOINT_BYTES = {"fp32": 12, "bf16": 14, "fp16": 14, "fp8": 14}
"""Of a parameter in a checkpoint: its fp32 weight and two moments, and the rounded weight."""
TOKEN_BYTES = 4
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunConditions:
    """What a run depends on beside its steps. ``storage_bandwidth``: bytes per second that all nodes together write to the storage of checkpoints, or read;
    ``data_bandwidth``: bytes per second of tokens that one node reads. ``asynchronous``: a checkpoint is copied to the host, which training waits for, and
    written from there beside the steps. ``detect_s`` and ``start_s``: until a failure is known, and until processes can load a checkpoint.
    ``interval_s``: between checkpoints; 0: the best (Daly)."""

    failures: FailureRates = LLAMA3
    storage_bandwidth: float = 20e9
    data_bandwidth: float = 200e6
    asynchronous: bool = True
    detect_s: float = 60.0
    start_s: float = 240.0
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunTime:
    """Seconds of a run of ``steps`` steps. ``data_s``: that a step waits for its tokens; ``stall_s`` and ``write_s``: that training waits for a checkpoint,
    and until it is committed; ``restart_s``: from a failure until steps are new again, without those repeated since the last checkpoint. ``share``: of the
    time in which steps are trained that count. ``cost``: in US dollars, 0 where the hardware has no price."""

    steps: int
    step_s: float
    data_s: float
    checkpoint_bytes: float
    stall_s: float
    write_s: float
    interval_s: float
    between_failures_s: float
    restart_s: float
    share: float
    seconds: float
    failures: float
    gpu_hours: float
    cost: float


def predict_run(
    shapes: ModelShapes, layout: TrainingLayout, hardware: Hardware, step_s: float, tokens: float, conditions: RunConditions = RunConditions()
) -> RunTime:
    """Returns the expected time of training on ``tokens`` tokens in steps of ``step_s`` seconds. Raises ``ValueError`` for fewer tokens than a step has."""
    each = layout.global_batch * layout.sequence
    if tokens < each:
        raise ValueError(f"a run of {tokens:g} tokens is shorter than its step of {each:,}")
    steps = round(tokens / each)
    nodes = -(-layout.gpus // hardware.gpus_per_node)
    # Every node reads its ranks' part of the next step while this one is computed.
    data_s = max(0.0, TOKEN_BYTES * each / (nodes * conditions.data_bandwidth) - step_s)
    state = float(CHECKPOINT_BYTES[layout.precision] * parameter_count(shapes))
    written_s = state / conditions.storage_bandwidth
    stall_s, write_s = (state / layout.gpus / hardware.host_bandwidth, written_s) if conditions.asynchronous else (written_s, 0.0)
    between_s = conditions.failures.between_failures_s(layout.gpus)
    # Until a checkpoint is committed, a failure goes back to the one before.
    restart_s = conditions.detect_s + conditions.start_s + written_s + write_s
    interval_s = conditions.interval_s or max(daly_interval_s(between_s, stall_s), write_s)
    interval_s = max(interval_s, step_s + data_s)
    share = expected_share(between_s, interval_s, stall_s, restart_s) * step_s / (step_s + data_s)
    seconds = steps * step_s / share
    gpu_hours = seconds * layout.gpus / HOUR_S
    return RunTime(
        steps=steps, step_s=step_s, data_s=data_s, checkpoint_bytes=state, stall_s=stall_s, write_s=write_s, interval_s=interval_s,
        between_failures_s=between_s, restart_s=restart_s, share=share, seconds=seconds, failures=seconds / between_s, gpu_hours=gpu_hours,
        cost=gpu_hours * hardware.price_per_hour,
    )  # fmt: skip
