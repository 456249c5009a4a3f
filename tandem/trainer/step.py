"""The step executor: one optimizer step on micro-batches, given a loss. It knows no algorithm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tandem.kernels.api import TokenLogprobs
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.trainer.guard import StepGuard, Verdict
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.optimizer import Optimizer
from tandem.types import RunError


class LossShare(NamedTuple):
    """What one micro-batch adds: ``loss`` is its share of the loss of the global batch, ``sums`` its shares of metrics
    (added over micro-batches in their order, in float64), ``maxima`` values of which the largest is kept."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


Loss = Callable[[TokenLogprobs, MicroBatch], LossShare]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class StepResult:
    """``metrics`` by name, ``tokens`` that went through the network, ``updated``: whether the weights changed; ``verdict``: what a guard
    said."""

    metrics: dict[str, float]
    tokens: int
    updated: bool
    verdict: Verdict = "taken"


def predict(model: Decoder, micro_batch: MicroBatch, temperature: float) -> TokenLogprobs:
    """The model's log-probabilities of a micro-batch's targets [R]."""
    context = PackedContext(micro_batch.cu_seqlens, micro_batch.max_seqlen)
    hidden = model(micro_batch.tokens, micro_batch.positions, context)
    return model.token_logprobs(hidden, micro_batch.rows, micro_batch.targets, temperature, len(micro_batch.tokens))


def train_step(
    model: Decoder,
    optimizer: Optimizer,
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    learning_rate: float,
    temperature: float = 1.0,
    on_progress: Progress | None = None,
    guard: StepGuard | None = None,
) -> StepResult:
    """One optimizer step. Without a micro-batch nothing counts, and weights and moments stay as they are.

    Where the loss or the gradient is not finite, weights and moments stay as they are too, and ``guard`` says so in the result; without
    one, ``RunError`` is raised.
    """
    scale = 1.0 if guard is None else guard.scale
    total = 0.0
    optimizer.zero_grad()
    metrics: dict[str, float] = {}
    for done, micro_batch in enumerate(micro_batches, start=1):
        share = loss(predict(model, micro_batch, temperature), micro_batch)
        (share.loss if scale == 1.0 else share.loss * scale).backward()
        total += share.loss.item()
        for name, value in share.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        for name, value in share.maxima.items():
            metrics[name] = max(metrics.get(name, 0.0), value.item())
        if on_progress is not None:
            on_progress(done, len(micro_batches))
    if scale != 1.0:
        for parameter in optimizer.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / scale)
    grad_norm = optimizer.clip() if micro_batches else 0.0
    verdict: Verdict = "taken"
    if guard is not None:
        verdict = guard.judge(grad_norm, total)
    elif not (math.isfinite(grad_norm) and math.isfinite(total)):
        what = f"the gradient norm is {grad_norm}" if not math.isfinite(grad_norm) else f"the loss is {total}"
        raise RunError(f"{what}: training has diverged; lower trainer.learning_rate or lengthen its warm-up")
    updated = bool(micro_batches) and verdict == "taken"
    if updated:
        optimizer.step(learning_rate)
    metrics |= {"actor/grad_norm": grad_norm, "actor/lr": learning_rate} | ({} if guard is None else guard.metrics())
    return StepResult(metrics, sum(m.tokens.numel() for m in micro_batches), updated, verdict)
