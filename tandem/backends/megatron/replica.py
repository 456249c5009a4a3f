"""A model that Megatron-Core trains, on one rank: what a step, the rollout's weights and checkpoints need of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.backends.library_sums import LibrarySums
from tandem.backends.megatron.groups import named
from tandem.backends.megatron.network import named_parameters
from tandem.backends.megatron.optimizer import MegatronOptimizer
from tandem.backends.megatron.passes import InFlight, Rows, Share, head_outputs, run_schedule
from tandem.layout.shapes import ModelShapes
from tandem.model.head_outputs import HeadOutputs
from tandem.model.megatron.layout import padded_vocabulary
from tandem.model.routing import ReplayCount
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.parallel.pipeline import broadcast_value
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.step import ForwardBackward, ForwardBackwardOutput, Loss, LossShare, OnPhase, Progress, stacked, sum_shares


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """The network of a ``MegatronReplica``, as steps see it. ``dtype``: of the weights that are updated."""

    shapes: ModelShapes
    dtype: torch.dtype
    device: torch.device
    router_balance: None = None
    replay_count: ReplayCount = field(default_factory=ReplayCount)


@dataclass(frozen=True, slots=True)
class MegatronReplica:
    """``network``: this rank's part of the GPT, each of its stages in Megatron's ``DistributedDataParallel``. ``sums``: ``None`` for a single process."""

    ranks: Ranks
    model: MegatronModel
    network: Sequence[Any]
    optimizer: MegatronOptimizer
    sums: LibrarySums | None

    def passes(self, own: int, most: int) -> int:
        """As ``Replica.passes``: ranks that share experts communicate within a pass; gradients are summed after the last one."""
        return most if self.ranks.groups["expert"].size > 1 else min(most, max(1, own))

    @property
    def forward_backward(self) -> ForwardBackward:
        return self._forward_backward

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:
        """Adds the gradients of ``micro_batches`` and sums them over ranks. Every rank of a pipeline is given the same micro-batches and returns the same
        metrics. A trace has the forward passes; ``after_backward`` is not called, because Megatron's schedules do not tell."""
        shares, in_flight = list[LossShare](), InFlight()

        def forward(number: int, micro_batch: MicroBatch, rows: Rows, stage: Any) -> tuple[Tensor, Share]:
            on_phase("forward")
            with tracer.span("forward", micro_batch=number):
                output = stage(rows.tokens, rows.positions, None)
            in_flight.watch(output)

            def share_of(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                share = loss(self._outputs(logits, rows, micro_batch, temperature), micro_batch)
                shares.append(share._replace(loss=share.loss.detach()))
                # The loss has the counts of the global batch in it: no tokens are counted, so nothing is divided by them.
                return share.loss, torch.zeros((), dtype=torch.int, device=logits.device), {}

            return output, share_of

        if not micro_batches:
            return ForwardBackwardOutput({}, {}, 0.0)
        with named("a pass", self.ranks):
            run_schedule(self.network, forward, micro_batches, self.ranks, on_progress, forward_only=False)
        own, pipeline = sum_shares(shares), self.ranks.groups["pipeline"]
        totals = broadcast_value(
            pipeline, {"sums": own.sums, "maxima": own.maxima, "loss": own.loss}, pipeline.size - 1, "metrics", self.model.device
        )
        return ForwardBackwardOutput(**totals, max_in_flight_micro_batches=in_flight.most)

    @torch.no_grad()
    def infer(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
    ) -> list[Tensor]:
        """Returns what ``trainer.logprobs.infer`` does; every rank of a pipeline returns the results of the last stage."""
        counts = [len(micro_batch.rows) for micro_batch in micro_batches]
        inferred = torch.empty(self.model.shapes.outputs, sum(counts), dtype=torch.float64, device=self.model.device)
        columns = inferred.split(counts, dim=1)

        def forward(number: int, micro_batch: MicroBatch, rows: Rows, stage: Any) -> tuple[Tensor, Share]:
            output = stage(rows.tokens, rows.positions, None)

            def keep(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                columns[number].copy_(stacked(self._outputs(logits, rows, micro_batch, temperature)))
                zero = torch.zeros((), device=logits.device)
                return zero, zero.int(), {}

            return output, keep

        if micro_batches:
            with named("a forward pass", self.ranks):
                run_schedule(self.network, forward, micro_batches, self.ranks, on_progress, forward_only=True)
        pipeline = self.ranks.groups["pipeline"]
        if pipeline.size > 1:
            pipeline.broadcast(inferred, pipeline.size - 1, "log-probabilities")
        return list(inferred.split(counts, dim=1))

    def _outputs(self, logits: Tensor, rows: Rows, micro_batch: MicroBatch, temperature: float) -> HeadOutputs:
        tensor, vocabulary = self.ranks.groups["tensor"], self.model.shapes.vocab_size
        first = tensor.rank * (padded_vocabulary(self.model.shapes, tensor.size) // tensor.size)
        return head_outputs(logits, rows, micro_batch.targets, temperature, first, vocabulary)

    def reshard(self) -> None:
        """Does nothing: every rank has its part of the weights at all times."""

    def drop_gradients(self) -> int:
        """Frees nothing: the memory of the gradients is Megatron's for the life of the process."""
        return 0

    def weights(self) -> list[Tensor]:
        return [*(parameter for _, parameter in named_parameters(self.network)), *(run.weights for run in self.optimizer.runs())]

    def moments(self) -> list[Tensor]:
        return [moment for _, _, moment in self.optimizer.moments()]

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in named_parameters(self.network):
            yield name, parameter.detach()

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in named_parameters(self.network):
            yield name, parameter.main_grad
