"""A model and its optimizer as one rank has them: alone, beside replicas, or cut by ZeRO."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.trainer.logprobs import infer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.optimizers.adamw import Optimizer
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.trainer.optimizers.blockwise import BLOCK
from tandem.trainer.optimizers.make import make_optimizer, make_piece_optimizer
from tandem.trainer.parallel.flat_buffer import ALIGNED
from tandem.trainer.parallel.gradient_reducer import GradientReducer, ReplicatedOptimizer
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.zero import ShardedOptimizer
from tandem.trainer.step import ForwardBackward, Progress, no_pipelining


@dataclass(frozen=True, slots=True)
class Replica:
    """``sums``: the gradients' sums over ranks (``None``: this process is alone). ``pipeline``: what the model's stages pass through."""

    ranks: Ranks
    model: Decoder
    optimizer: Optimizer
    sums: GradientReducer | None = None
    pipeline: Pipeline | None = None

    @property
    def passes_together(self) -> bool:
        """Whether ranks exchange something inside a forward and backward pass, so that all must go through as many."""
        balance = self.model.router_balance
        together = (self.sums is not None and self.sums.each_backward) or (balance is not None and balance.loss > 0)
        return together or self.ranks.groups["expert"].size > 1

    def whole(self, changes: bool = False) -> AbstractContextManager[None]:
        """Every rank holds all weights (of its part of the model) inside; ``changes``: they are written there."""
        optimizer = self.optimizer
        return optimizer.whole(changes) if isinstance(optimizer, ShardedOptimizer) else nullcontext()

    def addresses(self) -> AbstractContextManager[None]:
        """Every parameter has memory of its own inside; its numbers may not be there."""
        return self.optimizer.addresses() if isinstance(self.optimizer, ShardedOptimizer) else nullcontext()

    @property
    def forward_backward(self) -> ForwardBackward:
        """How micro-batches go through the model."""
        return no_pipelining(self.model) if self.pipeline is None else self.pipeline.forward_backward

    def infer(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
    ) -> dict[str, dict[int, float]]:
        """``trainer.logprobs.infer`` of this rank's micro-batches, on every rank of a pipeline."""
        if self.pipeline is not None:
            return self.pipeline.infer(micro_batches, temperature, on_progress)
        return infer(self.model, micro_batches, temperature, on_progress)

    def rest(self) -> None:
        """Give back what a forward pass without a backward left gathered."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.rest()
        elif self.paged is not None and self.paged.layers is not None:
            self.paged.layers.rest()

    @property
    def paged(self) -> PagedAdamW | None:
        """What updates the parameters that this rank updates, or its part of them, where its state lies in a file, and perhaps weights too."""
        optimizer = self.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.paged
        inner = optimizer.inner if isinstance(optimizer, ReplicatedOptimizer) else optimizer
        return inner if isinstance(inner, PagedAdamW) else None

    @property
    def pages_weights(self) -> bool:
        """Whether the layers' weights lie in a file."""
        return self.paged is not None and bool(self.paged.groups)


def make_replica(
    model: Decoder, config: TrainerConfig, ranks: Ranks, zero: Literal[0, 1, 2, 3] = 0, pipeline: Pipeline | None = None,
    directory: Path | None = None, is_filled: bool = True,
) -> Replica:
    """``model`` with the optimizer that ``config`` names; ``directory``: the run's, for what is offloaded. ``is_filled``: its weights are
    there; else, where they are to lie in a file, ``checkpoint.replica_state`` is to be given them."""
    if ranks.world.size == 1:
        return Replica(ranks, model, make_optimizer(model, config, directory, is_filled))
    sum_tied = pipeline.sum_tied_gradient if pipeline is not None and pipeline.has_tied_copy else None
    # Blocks of codes are not cut.
    aligned = BLOCK if config.optimizer == "adamw8bit" else ALIGNED
    sums = GradientReducer(model, ranks, each_backward=zero >= 2, sum_tied=sum_tied, aligned=aligned)
    if zero == 0:
        return Replica(ranks, model, ReplicatedOptimizer(make_optimizer(model, config, directory), sums, config.max_grad_norm), sums, pipeline)
    make_inner = partial(make_piece_optimizer, model, config, buckets=sums.buckets, directory=directory)
    sharded = ShardedOptimizer(sums, config.max_grad_norm, zero, make_inner, config.offload_parameters == "nvme", is_filled)
    return Replica(ranks, model, sharded, sums, pipeline)
