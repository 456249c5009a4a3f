"""Pipeline parallelism: executes one rank's part of a step's forward and backward passes by a schedule that is plain data."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.layout.pipeline_stages import Span
from tandem.layout.schedules import Operation, PipelineShape, ScheduleName, forward_schedule, schedule
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.runtime.collectives.communicator import Communicator, Pending
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import ForwardBackwardOutput, Loss, LossShare, OnPhase, Progress, stacked, sum_shares

AtLast = Callable[[Any, MicroBatch, Tensor], Any]
"""Is given the hidden states behind the last stage (or what ``Stages`` return there), the micro-batch, and the places among them of the tokens that predict."""


class Stages(Protocol):
    """The stages of a model, if more than the residual stream goes from one to the next."""

    def columns(self, stage: int) -> int:
        """Returns the columns of what goes into ``stage``."""
        ...

    def run(self, stage: int, tokens: Tensor, positions: Tensor, context: PackedContext, received: Tensor | None) -> Any:
        """Returns what goes into the next stage, or what the last one hands to ``AtLast``. ``received``: what goes into this one (``None``: it is the
        first)."""
        ...


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The stages ``spans`` of ``model``, between which the residual stream goes."""

    model: Decoder
    spans: Sequence[Span]

    def columns(self, stage: int) -> int:
        return self.model.shapes.hidden_size

    def run(self, stage: int, tokens: Tensor, positions: Tensor, context: PackedContext, received: Tensor | None) -> Tensor:
        hidden: Tensor = self.model(tokens, positions, context, span=self.spans[stage], received=received)
        return hidden


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One rank of a pipeline. ``model``: a decoder of this rank's stages; ``spans``: the layers of every stage; ``ranks``: the pipeline's
    communicator. Stage s is on rank s mod p."""

    model: Decoder
    spans: Sequence[Span]
    ranks: Communicator
    order: ScheduleName = "1f1b"

    def shape(self, micro_batches: int) -> PipelineShape:
        return PipelineShape(self.ranks.size, micro_batches, len(self.spans) // self.ranks.size)

    @property
    def is_first(self) -> bool:
        return self.ranks.rank == 0

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:
        """Adds ``scale`` times the gradients of ``micro_batches`` to this rank's parameters, each stage's in the order of the
        micro-batches.

        Every rank is given the same micro-batches, so that each knows the shapes it receives. ``after_backward`` is called after each
        backward pass of a stage. Every rank returns the metrics and the loss."""
        shares: list[LossShare] = []

        def at_last(hidden: Tensor, micro_batch: MicroBatch, rows: Tensor) -> Tensor:
            share = loss(self.model.head_outputs(hidden, rows, micro_batch.targets, temperature, len(micro_batch.tokens)), micro_batch)
            shares.append(share._replace(loss=share.loss.detach()))
            return share.scaled(scale)

        operations = schedule(self.order, self.shape(len(micro_batches)))
        done = _Pass(self, micro_batches, at_last, on_progress, tracer, True, after_backward, on_phase)
        done.run(operations[self.ranks.rank])
        own = sum_shares(shares)
        totals = self._from_last({"sums": own.sums, "maxima": own.maxima, "loss": own.loss}, "metrics")
        return ForwardBackwardOutput(**totals, max_in_flight_micro_batches=done.max_in_flight_micro_batches)

    def backward_order(self, micro_batches: int) -> list[int]:
        """Returns the number of the micro-batch of each backward pass of this rank, in order."""
        operations = schedule(self.order, self.shape(micro_batches))[self.ranks.rank]
        return [operation.micro_batch for operation in operations if operation.kind == "backward"]

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[MicroBatch], at_last: AtLast, on_progress: Progress | None = None, tracer: Tracer = NO_TRACE,
        on_phase: OnPhase = lambda phase: None, stages: Stages | None = None,
    ) -> None:  # fmt: skip
        """Runs the forward pass without gradients. On the rank of the last stage, ``at_last`` is called with the output of the whole model
        for every micro-batch, of all its tokens, in their order; its result is dropped. ``stages``: compute it (``None``: ``ResidualStream``)."""
        operations = forward_schedule(self.shape(len(micro_batches)))
        _Pass(self, micro_batches, at_last, on_progress, tracer, keeps=False, on_phase=on_phase, stages=stages).run(operations[self.ranks.rank])

    @property
    def has_tied_copy(self) -> bool:
        """Whether this rank and another each have a copy of a tied embedding."""
        return self.model.shapes.tie_word_embeddings and self.ranks.size > 1 and (self.is_first or self.is_last)

    def sum_tied_gradient(self, own: Tensor) -> Tensor:
        """Returns the gradient of a tied embedding, or a part of it, summed over the first and the last stage: the same bits on both.
        Called once a step on both ranks, before or after the sum over replicas."""
        peer = self.ranks.size - 1 if self.is_first else 0
        name = "gradient of the tied embedding"
        # In opposite order on the two ranks: between two GPUs NCCL starts a transfer only after the previous one.
        if self.is_first:
            sent, arriving = self.ranks.send(own, peer, name), self.ranks.receive(torch.empty_like(own), peer, name)
        else:
            arriving, sent = self.ranks.receive(torch.empty_like(own), peer, name), self.ranks.send(own, peer, name)
        other = arriving.wait()
        sent.wait()
        # Added in the same order on both, so that the copies stay equal bit for bit.
        return own + other if self.is_first else other + own

    def infer(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
    ) -> list[Tensor]:
        """Runs ``trainer.logprobs.infer`` through the pipeline; every rank returns the results of the last stage."""
        rows = [len(micro_batch.rows) for micro_batch in micro_batches]
        outputs_of_batches = torch.empty(self.model.shapes.outputs, sum(rows), dtype=torch.float64, device=self.model.device)
        parts = iter(outputs_of_batches.split(rows, dim=1))

        def at_last(hidden: Tensor, micro_batch: MicroBatch, rows: Tensor) -> Tensor:
            outputs = self.model.head_outputs(hidden, rows, micro_batch.targets, temperature, len(micro_batch.tokens))
            next(parts).copy_(stacked(outputs))
            return hidden

        self.forward(micro_batches, at_last, on_progress)
        self.ranks.broadcast(outputs_of_batches, self.ranks.size - 1, "log-probabilities")
        return list(outputs_of_batches.split(rows, dim=1))

    def _from_last(self, value: Any, name: str) -> Any:
        return broadcast_value(self.ranks, value, self.ranks.size - 1, name, next(self.model.parameters()).device)


class _Pass:
    """The state of one pass over micro-batches. ``keeps``: a backward pass follows."""

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], at_last: AtLast, on_progress: Progress | None, tracer: Tracer,
        keeps: bool = True, after_backward: Callable[[], None] | None = None, on_phase: OnPhase = lambda phase: None,
        stages: Stages | None = None,
    ) -> None:  # fmt: skip
        self.stages = stages or ResidualStream(pipeline.model, pipeline.spans)
        self.pipeline, self.micro_batches, self.at_last, self.keeps = pipeline, micro_batches, at_last, keeps
        self.on_progress, self.tracer, self.after_backward, self.on_phase = on_progress, tracer, after_backward, on_phase
        self.shape = pipeline.shape(len(micro_batches))
        self.arriving: dict[tuple[str, int, int], Pending] = {}
        self.sending: deque[Pending] = deque()
        self.received: dict[tuple[int, int], Tensor] = {}
        self.returned: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.max_in_flight_micro_batches = self.done = 0

    def run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            kind, at = operation.kind, (operation.stage, operation.micro_batch)
            if kind == "forward":
                self._forward(*at)
            elif kind == "backward":
                self._backward(*at)
            elif kind == "send_activation":
                self._send(operation, (self.returned[at] if self.keeps else self.returned.pop(at)).detach())
            elif kind == "send_gradient":
                self._send(operation, self.gradients.pop(at))
            else:
                self._post(operation)
        while self.sending:
            self.sending.popleft().wait()

    def _forward(self, stage: int, number: int) -> None:
        self.on_phase("forward")
        model, span, micro_batch = self.pipeline.model, self.pipeline.spans[stage], self.micro_batches[number]
        received = self._arrived("receive_activation", stage, number) if stage > 0 else None
        with self.tracer.span("forward", stage=stage, micro_batch=number):
            if received is not None and self.keeps:
                self.received[stage, number] = received.requires_grad_()
            context, rows = micro_batch.context, micro_batch.rows
            if span.is_last and self.keeps:
                # As in one process, whose gradients are sums over as many rows.
                context, rows = model.wanting(context, rows, len(micro_batch.tokens))
            out = self.stages.run(stage, micro_batch.tokens, micro_batch.positions, context, received)
            if span.is_last:
                out = self.at_last(out, micro_batch, rows)
            if self.keeps or not span.is_last:
                self.returned[stage, number] = out
        self.max_in_flight_micro_batches = max(self.max_in_flight_micro_batches, len(self.returned))
        if not self.keeps:
            self._count()

    def _backward(self, stage: int, number: int) -> None:
        self.on_phase("backward")
        is_last = self.pipeline.spans[stage].is_last
        gradient = None if is_last else self._arrived("receive_gradient", stage, number)
        with self.tracer.span("backward", stage=stage, micro_batch=number):
            out = self.returned.pop((stage, number))
            root = out if gradient is None else _End.apply(out, gradient)
            root.backward()  # type: ignore[no-untyped-call]
            if stage > 0:
                made = self.received.pop((stage, number)).grad
                assert made is not None
                self.gradients[stage, number] = made
        if self.after_backward is not None:
            self.after_backward()
        self._count()

    def _count(self) -> None:
        self.done += 1
        if self.on_progress is not None and self.done % self.shape.virtual_stages == 0:
            self.on_progress(self.done // self.shape.virtual_stages, len(self.micro_batches))

    def _send(self, operation: Operation, x: Tensor) -> None:
        with self.tracer.span(operation.kind, stage=operation.stage, micro_batch=operation.micro_batch, peer=operation.peer):
            name = _name(operation)
            self.sending.append(self.pipeline.ranks.send(x, operation.peer, name, self.shape.tag(operation)))
            # Bounds the tensors kept for pending sends. This cannot deadlock: the order of operations also works with blocking sends.
            while len(self.sending) > 2 * self.shape.stages:
                self.sending.popleft().wait()

    def _post(self, operation: Operation) -> None:
        model = self.pipeline.model
        tokens = len(self.micro_batches[operation.micro_batch].tokens)
        rows = tokens if model.parallel is None else model.parallel.residual_rows(tokens)
        weight = next(model.parameters())
        columns = self.stages.columns(operation.stage if operation.kind == "receive_activation" else operation.stage + 1)
        space = weight.new_empty(rows, columns, dtype=model.dtype)
        pending = self.pipeline.ranks.receive(space, operation.peer, _name(operation), self.shape.tag(operation))
        self.arriving[operation.kind, operation.stage, operation.micro_batch] = pending

    def _arrived(self, kind: str, stage: int, number: int) -> Tensor:
        with self.tracer.span(kind, stage=stage, micro_batch=number):
            return self.arriving.pop((kind, stage, number)).wait()


class _End(torch.autograd.Function):
    """The end of a stage before the last: a number whose gradient by the output of the stage is ``gradient``, which the next stage has sent. torch imports
    sympy for ``Tensor.backward(gradient)``, of which a rank keeps 33 MiB."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.gradient, None


def _name(operation: Operation) -> str:
    return f"{operation.kind.replace('_', ' ')} of micro-batch {operation.micro_batch} at stage {operation.stage}"


def broadcast_value(ranks: Communicator, value: Any, source: int, name: str, device: torch.device) -> Any:
    """Returns rank ``source``'s JSON-serializable ``value`` on every rank."""
    if ranks.size == 1:
        return value
    own = json.dumps(value).encode() if ranks.rank == source else b""
    length = torch.tensor([len(own)], device=device)
    ranks.broadcast(length, source, name)
    content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if ranks.rank == source:
        content.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    ranks.broadcast(content, source, name)
    return json.loads(bytes(content.cpu().tolist()))
