"""The step executor: one optimizer step on micro-batches, given a loss. Independent of the algorithm."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.kernels.api import TokenLogprobs
from tandem.model.decoder import Decoder
from tandem.model.described import DescribedModel
from tandem.model.head_outputs import HeadOutputs
from tandem.model.router_balance import RouterBalance
from tandem.model.routing import ReplayCount
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.grad_scaler import GradScaler, Verdict
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.parallel.ranks import Ranks
from tandem.types import RunError


class TrainedModel(DescribedModel, Protocol):
    """A network in training. ``router_balance``: of its experts (``None``: nothing balances them). ``replay_count``: of choices of experts that were
    replayed."""

    @property
    def router_balance(self) -> RouterBalance | None: ...

    @property
    def replay_count(self) -> ReplayCount: ...


class StepOptimizer(Protocol):
    """What a step needs of an optimizer (``optimizers.adamw.Optimizer``). ``updates``: the number of updates made."""

    @property
    def updates(self) -> int: ...

    def zero_grad(self) -> None: ...

    def clip(self, scale: float = 1.0) -> float: ...

    def step(self, learning_rate: float) -> None: ...


class GradientSums(Protocol):
    """What a step needs of the sum of gradients over ``ranks`` (``parallel.gradient_reducer.GradientReducer``)."""

    @property
    def ranks(self) -> Ranks: ...

    def expect(self, backwards: int) -> None: ...

    def end_backward(self) -> None: ...

    def finish(self) -> None: ...


class DoubleCheck(Protocol):
    """What a step needs of the comparison of micro-batches that are computed twice (``corruption.check.CorruptionCheck``)."""

    def begin(
        self, micro_batches: Sequence[MicroBatch], loss: "Loss", after_backward: Callable[[], None] | None,
        again: "Callable[[MicroBatch, Loss, Callable[[], None] | None], None]",
    ) -> "tuple[Loss, Callable[[], None] | None]": ...

    def end(self) -> None: ...


class LossShare(NamedTuple):
    """One micro-batch's contribution: ``loss`` is its share of the loss of the global batch, ``sums`` its shares of metrics (added over
    micro-batches in order, in float64), ``maxima`` values of which the largest is kept."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def scaled(self, scale: float) -> Tensor:
        """Returns the loss that a backward pass begins from (``GradScaler``)."""
        return self.loss if scale == 1.0 else self.loss * scale


Loss = Callable[[HeadOutputs, MicroBatch], LossShare]
Progress = Callable[[int, int], None]
Phase = Literal["forward", "backward", "reduce", "optimizer"]
OnPhase = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The totals of the forward and backward passes of a step's micro-batches: ``sums`` and ``maxima`` of their metrics, and ``loss``.
    ``max_in_flight_micro_batches``: the largest number of micro-batches with activations in memory at once, counted for each pipeline stage
    of this rank."""

    sums: dict[str, float]
    maxima: dict[str, float]
    loss: float
    max_in_flight_micro_batches: int = 1


class ForwardBackward(Protocol):
    """Adds ``scale`` times the gradients of ``micro_batches`` to the parameters and calls ``after_backward`` after each backward pass.
    ``on_phase`` is called with each phase as it starts."""

    def __call__(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepResult:
    """``metrics`` by name; ``tokens`` that went through the network; ``updated``: whether the weights changed; ``verdict``: the guard's;
    ``packing``: metrics of how full the micro-batches were."""

    metrics: dict[str, float]
    tokens: int
    updated: bool
    verdict: Verdict = "taken"
    packing: Mapping[str, float] = field(default_factory=dict)


def predict(model: Decoder, micro_batch: MicroBatch, temperature: float) -> HeadOutputs:
    """Returns the model's log-probabilities of a micro-batch's targets [R], or the values of the states before them, or both."""
    return model.outputs(micro_batch.tokens, micro_batch.positions, micro_batch.context, micro_batch.rows, micro_batch.targets, temperature)


def stacked(outputs: HeadOutputs) -> Tensor:
    """Returns what an inference pass keeps of the heads' outputs, float64 [``ModelShapes.outputs``, R]: log-probabilities, raw and at the
    temperature, of a language-model head, then the values of a value head."""
    logprobs = [] if outputs.of_language is None else [outputs.of_language.raw, outputs.of_language.scaled]
    return torch.stack(logprobs + ([] if outputs.of_value is None else [outputs.of_value])).double()


def unstacked(model: Decoder, kept: Tensor) -> HeadOutputs:
    """Returns the heads' outputs of what ``stacked`` kept of them [``ModelShapes.outputs``, R]; there is no entropy."""
    logprobs = TokenLogprobs(kept[0], kept[1], kept.new_empty(0)) if model.shapes.language_head else None
    return HeadOutputs(logprobs, kept[-1] if model.shapes.value_head != "none" else None)


def sum_shares(shares: Iterable[LossShare]) -> ForwardBackwardOutput:
    """Adds the shares of micro-batches, in order."""
    total, sums, maxima = 0.0, dict[str, float](), dict[str, float]()
    held = [share._replace(loss=share.loss.detach()) for share in shares]
    every = [value.double() for share in held for value in (share.loss, *share.sums.values(), *share.maxima.values())]
    # Synchronizes with the device once, after all passes have been queued.
    values = iter(torch.stack(every).tolist() if every else ())
    for share in held:
        total += next(values)
        for name in share.sums:
            sums[name] = sums.get(name, 0.0) + next(values)
        for name in share.maxima:
            maxima[name] = max(maxima.get(name, 0.0), next(values))
    return ForwardBackwardOutput(sums, maxima, total)


def no_pipelining(model: Decoder) -> ForwardBackward:
    """Returns a function that runs one micro-batch after the other through the whole ``model``."""

    def forward_backward(
        micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:  # fmt: skip
        def shares() -> Iterator[LossShare]:
            for number, micro_batch in enumerate(micro_batches):
                on_phase("forward")
                with tracer.span("forward", micro_batch=number):
                    share = loss(predict(model, micro_batch, temperature), micro_batch)
                on_phase("backward")
                with tracer.span("backward", micro_batch=number):
                    share.scaled(scale).backward()
                    if after_backward is not None:
                        after_backward()
                yield share
                if on_progress is not None:
                    on_progress(number + 1, len(micro_batches))

        return sum_shares(shares())

    return forward_backward


def train_step(
    model: TrainedModel,
    optimizer: StepOptimizer,
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    learning_rate: float,
    temperature: float = 1.0,
    on_progress: Progress | None = None,
    guard: GradScaler | None = None,
    sums: GradientSums | None = None,
    on_phase: OnPhase = lambda phase: None,
    forward_backward: ForwardBackward | None = None,
    tracer: Tracer = NO_TRACE,
    on_gradients: Callable[[], None] | None = None,
    check: DoubleCheck | None = None,
) -> StepResult:
    """Executes one optimizer step. Without micro-batches, weights and moments are unchanged.

    ``sums``: reduces the gradients of the ranks that train together, for ``optimizer``. Each rank is given its own micro-batches, at least
    one (``micro_batch.blank``); loss, metrics and gradient are global. ``on_phase`` is called with each phase as it starts.

    If the loss or the gradient is not finite, weights and moments are unchanged, and ``guard`` returns the verdict; without a guard,
    ``RunError`` is raised. ``forward_backward``: runs the micro-batches (``None``: ``no_pipelining``).
    ``on_gradients`` is called when the gradients are summed over ranks. ``check`` (with ``sums``): of micro-batches that are computed twice; it raises
    before the weights change.
    """
    scale = 1.0 if guard is None else guard.scale
    optimizer.zero_grad()
    balance = model.router_balance
    if balance is not None:
        balance.begin(sum(m.tokens.numel() for m in micro_batches), scale)
    if forward_backward is None:
        assert isinstance(model, Decoder)
        forward_backward = no_pipelining(model)
    after_backward = None if sums is None else sums.end_backward
    if check is not None:
        assert sums is not None
        again = partial(_compute_apart, model, optimizer, sums, forward_backward, temperature, scale, tracer)
        loss, after_backward = check.begin(micro_batches, loss, after_backward, again)
    if sums is not None:
        sums.expect(len(micro_batches))
    output = forward_backward(micro_batches, loss, temperature, on_progress, tracer, scale, after_backward, on_phase)
    total, metrics, maxima = output.loss, output.sums, output.maxima
    on_phase("reduce")
    if sums is not None:
        with tracer.span("reduce"):
            sums.finish()
            total, metrics, maxima = over_ranks(sums.ranks, total, metrics, maxima)
    if check is not None:
        check.end()
    if on_gradients is not None:
        on_gradients()
    with tracer.span("clip"):
        grad_norm = optimizer.clip(scale) if micro_batches else 0.0
    verdict: Verdict = "taken"
    if guard is not None:
        verdict = guard.judge(grad_norm, total)
    elif not (math.isfinite(grad_norm) and math.isfinite(total)):
        what = f"the gradient norm is {grad_norm}" if not math.isfinite(grad_norm) else f"the loss is {total}"
        raise RunError(f"{what}: training has diverged; lower trainer.learning_rate or lengthen its warm-up")
    updated = bool(micro_batches) and verdict == "taken"
    if updated:
        on_phase("optimizer")
        with tracer.span("optimizer"):
            optimizer.step(learning_rate)
    if balance is not None:
        metrics = metrics | balance.end(updated)
    metrics = metrics | maxima | {"actor/grad_norm": grad_norm, "actor/lr": learning_rate} | ({} if guard is None else guard.metrics())
    return StepResult(metrics, sum(m.tokens.numel() for m in micro_batches), updated, verdict)


def _compute_apart(
    model: TrainedModel, optimizer: StepOptimizer, sums: GradientSums, forward_backward: ForwardBackward, temperature: float, scale: float, tracer: Tracer,
    micro_batch: MicroBatch, loss: Loss, after_backward: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Runs a micro-batch that is no part of the step, and drops its gradients. ``after_backward``: see ``ForwardBackward``."""

    def ended() -> None:
        sums.end_backward()
        if after_backward is not None:
            after_backward()

    balance = model.router_balance
    with tracer.span("compute twice"), model.replay_count.apart(), nullcontext() if balance is None else balance.apart():
        sums.expect(1)
        forward_backward([micro_batch], loss, temperature, None, tracer, scale, ended)
        sums.finish()
        optimizer.zero_grad()


def over_ranks(
    ranks: Ranks, loss: float, sums: dict[str, float], maxima: dict[str, float]
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Returns the loss and the metrics of the global batch from each rank's shares. All ranks have the same metric names."""
    loss, *added = ranks.sums([loss, *sums.values()], "the loss")
    totals = dict(zip(sums, added, strict=True))
    if not maxima:
        return loss, totals, {}
    largest = [max(column) for column in zip(*ranks.all_values(list(maxima.values()), "largest values"), strict=True)]
    return loss, totals, dict(zip(maxima, largest, strict=True))
