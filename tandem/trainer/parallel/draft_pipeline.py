"""A draft head on a mesh whose ranks compute its target together.

One rank of each data-parallel replica has the head: the first of the tensor-parallel ranks of the last pipeline stage. The target has no gradient, so its
stages only pass forward, one micro-batch behind the other, while that rank trains the head with those that have arrived. The others have no parameter of it
and no part in its gradients, which are summed over the ranks that have it; the numbers are those of one process with the same hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.model.draft_decoder import DraftDecoder
from tandem.model.draft_target import DraftTarget, LastStates
from tandem.runtime.records.tracing import NO_TRACE, Tracer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.parallel.pipeline import Pipeline, broadcast_value
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.step import ForwardBackwardOutput, Loss, LossShare, OnPhase, Progress, sum_shares


def has_head(ranks: Ranks) -> bool:
    """Returns whether this rank has the draft head of its replica."""
    tensor, stages = ranks.groups["tensor"], ranks.groups["pipeline"]
    return tensor.rank == 0 and stages.rank == stages.size - 1


@dataclass(frozen=True, slots=True)
class DraftPipeline:
    """One rank of a replica of ``model``. ``target``: the pipeline of its target, of one stage where only tensor-parallel ranks divide it."""

    model: DraftDecoder
    target: Pipeline
    ranks: Ranks

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float = 1.0, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, scale: float = 1.0, after_backward: Callable[[], None] | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:  # fmt: skip
        """Does ``step.ForwardBackward``. Every rank is given the same micro-batches, and returns the metrics and the loss."""

        def trained(share: LossShare) -> None:
            on_phase("backward")
            with tracer.span("backward"):
                share.scaled(scale).backward()  # type: ignore[no-untyped-call]
                if after_backward is not None:
                    after_backward()

        return self._run(micro_batches, loss, trained, on_progress, tracer, on_phase)

    def sums(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> dict[str, float]:
        """Returns the sums of the metrics of ``loss`` over ``micro_batches``, without gradients; the same on every rank."""
        return self._run(micro_batches, loss, None).sums

    def backward_order(self, micro_batches: int) -> list[int]:
        """Returns the number of the micro-batch of each backward pass of the rank that has the head, in order."""
        return list(range(micro_batches))

    def _run(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, trained: Callable[[LossShare], None] | None, on_progress: Progress | None = None,
        tracer: Tracer = NO_TRACE, on_phase: OnPhase = lambda phase: None,
    ) -> ForwardBackwardOutput:  # fmt: skip
        """``trained``: is given the loss of each micro-batch, to go backward from (``None``: there is no gradient)."""
        head, shares = self.model.head, list[LossShare]()
        stages = DraftTarget(self.target.model, self.target.spans, self.model.head_shapes)

        def at_last(last: Any, micro_batch: MicroBatch, rows: Tensor) -> None:
            assert isinstance(last, LastStates)
            read = stages.outputs(last, len(micro_batch.tokens), rows, None if head is None else head.target_ids)
            if read is None:
                return
            with torch.set_grad_enabled(trained is not None):
                outputs = self.model.of_target(read, micro_batch.tokens, micro_batch.positions, micro_batch.context, rows)
                share = loss(outputs, micro_batch)
                if trained is not None:
                    trained(share)
            shares.append(share._replace(loss=share.loss.detach()))

        self.target.forward(micro_batches, at_last, on_progress, tracer, on_phase, stages)
        own = sum_shares(shares)
        told: Any = {"sums": own.sums, "maxima": own.maxima, "loss": own.loss}
        for group, source in ((self.ranks.groups["pipeline"], -1), (self.ranks.groups["tensor"], 0)):
            told = broadcast_value(group, told, source % group.size, "metrics of a draft head", self.model.device)
        return ForwardBackwardOutput(**told)
