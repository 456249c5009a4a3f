"""A model and its optimizer on one rank: alone, replicated, or sharded by ZeRO."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.trainer.logprobs import infer
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.offload.pages import WEIGHTS
from tandem.trainer.optimizers.adamw import Optimizer
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.trainer.optimizers.blockwise import BLOCK
from tandem.trainer.optimizers.make import make_optimizer, make_piece_optimizer
from tandem.trainer.parallel.draft_pipeline import DraftPipeline
from tandem.trainer.parallel.flat_buffer import ALIGNED
from tandem.trainer.parallel.gradient_reducer import GradientReducer, ReplicatedOptimizer
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.zero import ShardedOptimizer
from tandem.trainer.parallel.zero_frozen import FrozenShards
from tandem.trainer.step import ForwardBackward, Progress, no_pipelining


@dataclass(frozen=True, slots=True)
class Replica:
    """``sums``: reduces the gradients over ranks (``None``: a single process). ``pipeline``: the pipeline of the model's stages, or of a draft head behind
    those of its target (``None``: one stage)."""

    ranks: Ranks
    model: Decoder
    optimizer: Optimizer
    sums: GradientReducer | None = None
    pipeline: Pipeline | DraftPipeline | None = None

    def passes(self, own: int, most: int) -> int:
        """Returns the number of micro-batches that this rank passes, given that it has ``own`` and the data-parallel rank with the most has
        ``most``: ``most`` if ranks communicate within a forward or backward pass; otherwise its own, at least one if any rank has one."""
        balance = self.model.router_balance
        together = (self.sums is not None and self.sums.each_backward) or (balance is not None and balance.loss > 0)
        return most if together or self.ranks.groups["expert"].size > 1 else min(most, max(1, own))

    def whole(self, changes: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which every rank holds all weights (of its part of the model). ``changes``: the caller changes them."""
        optimizer = self.optimizer
        return optimizer.whole(changes) if isinstance(optimizer, ShardedOptimizer) else nullcontext()

    @property
    def shards_weights(self) -> bool:
        """Whether this rank holds only a part of each weight (ZeRO 3)."""
        return isinstance(self.optimizer, ShardedOptimizer) and self.optimizer.stage == 3

    def addresses(self) -> AbstractContextManager[None]:
        """Returns a context in which every parameter has memory of its own; its values may be absent."""
        return self.optimizer.addresses() if isinstance(self.optimizer, ShardedOptimizer) else nullcontext()

    @property
    def forward_backward(self) -> ForwardBackward:
        """The function that runs the forward and backward passes of micro-batches."""
        return no_pipelining(self.model) if self.pipeline is None else self.pipeline.forward_backward

    def backward_order(self, micro_batches: int) -> list[int]:
        """Returns the number of the micro-batch of each backward pass of this rank in ``forward_backward``, in order."""
        return list(range(micro_batches)) if self.pipeline is None else self.pipeline.backward_order(micro_batches)

    def infer(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
    ) -> list[Tensor]:
        """Runs ``trainer.logprobs.infer`` on this rank's micro-batches; every rank of a pipeline returns the results."""
        assert not isinstance(self.pipeline, DraftPipeline), "a draft head has no log-probabilities"
        return _infer(self.model, self.pipeline, micro_batches, temperature, on_progress)

    def reshard(self) -> None:
        """Frees the weights that a forward pass without a backward pass left gathered."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.reshard()
        elif self.paged is not None and self.paged.layers is not None:
            self.paged.layers.release()

    def drop_gradients(self) -> int:
        """Drops gradients and the memory reserved for them. Returns the bytes of the gradients."""
        held = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.sums is not None:
            held += [own for own in self.sums.own if own is not None]
        size = sum(gradient.nbytes for gradient in held)
        self.optimizer.zero_grad()
        if self.sums is not None:
            self.sums.release()
        return size

    def weights(self) -> list[Tensor]:
        """Returns the tensors in memory that hold this rank's weights, between two steps. Several may share storage."""
        optimizer = self.optimizer
        self.reshard()
        own = optimizer.parts() if isinstance(optimizer, ShardedOptimizer) and self.paged is None else ()
        return [*self.model.parameters(), *self.model.frozen_tensors(), *(part.values for part in own if part.kind == WEIGHTS)]

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter of this rank's part of the model by name. Under ZeRO 3 one layer is gathered at a time, and every rank must take all."""
        optimizer = self.optimizer
        self.reshard()
        if isinstance(optimizer, ShardedOptimizer) and optimizer.stage == 3:
            for shard in optimizer.shards:
                shard.gather()
                yield from shard.bucket.views(shard.whole).items()
                shard.free()
            return
        weight = self.model.get_parameter if self.paged is None or isinstance(optimizer, ShardedOptimizer) else self.paged.weight
        for name, _ in self.model.named_parameters():
            yield name, weight(name).detach()

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the gradients of the parameters, or of this rank's part of them, once they are summed over ranks."""
        yield from ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        for bucket, own in zip(self.sums.buckets, self.sums.own, strict=True) if self.sums is not None else ():
            if own is not None:
                yield f"{bucket.label}, this rank's part", own

    def moments(self) -> list[Tensor]:
        """Returns the tensors in memory that hold this rank's optimizer state; none before the first step, or if the state is paged."""
        return [] if self.paged is not None else list(self.optimizer.state().moments.values())

    @property
    def paged(self) -> PagedAdamW | None:
        """The paged optimizer of this rank's parameters or part of them, if its state is in a file; the weights may be there too."""
        optimizer = self.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.paged
        inner = optimizer.inner if isinstance(optimizer, ReplicatedOptimizer) else optimizer
        return inner if isinstance(inner, PagedAdamW) else None

    @property
    def pages_weights(self) -> bool:
        """Whether the layers' weights are in a file."""
        return self.paged is not None and bool(self.paged.groups)


@dataclass(frozen=True, slots=True)
class FrozenReplica:
    """A model without an optimizer, such as the reference, on one rank of a mesh: whole, or its tensor, expert and pipeline part.
    ``pipeline``: the pipeline of the model's stages (``None``: one stage). ``shards``: its weights under ZeRO 3 (``None``: each rank has them all)."""

    ranks: Ranks
    model: Decoder
    pipeline: Pipeline | None = None
    shards: FrozenShards | None = None

    def passes(self, own: int, most: int) -> int:
        """As ``Replica.passes``; only expert-parallel ranks and those that share the weights communicate within a forward pass."""
        return most if self.shards is not None or self.ranks.groups["expert"].size > 1 else min(most, max(1, own))

    def infer(
        self, micro_batches: Sequence[MicroBatch], temperature: float = 1.0, on_progress: Progress | None = None
    ) -> list[Tensor]:
        """Runs ``trainer.logprobs.infer`` on this rank's micro-batches; every rank of a pipeline returns the results."""
        return _infer(self.model, self.pipeline, micro_batches, temperature, on_progress)

    def reshard(self) -> None:
        """Frees the weights that the forward passes gathered."""
        if self.shards is not None:
            self.shards.reshard()

    def weights(self) -> list[Tensor]:
        """Returns the tensors that hold this rank's weights, between two forward passes."""
        return list(self.model.parameters()) if self.shards is None else self.shards.parts()

    def runs(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yields the weights that this rank holds, between two forward passes, as (parameter, its first element here, the elements), live and flat."""
        if self.shards is not None:
            yield from self.shards.runs()
            return
        for name, parameter in self.model.named_parameters():
            yield name, 0, parameter.detach().view(-1)

    @contextmanager
    def addresses(self) -> Iterator[None]:
        """Is a context in which every parameter has memory of its own; its values may be absent."""
        if self.shards is None:
            yield
            return
        self.shards.reserve()
        try:
            yield
        finally:
            self.shards.reshard()


def _infer(
    model: Decoder, pipeline: Pipeline | None, micro_batches: Sequence[MicroBatch], temperature: float, on_progress: Progress | None
) -> list[Tensor]:
    if pipeline is not None:
        return pipeline.infer(micro_batches, temperature, on_progress)
    return infer(model, micro_batches, temperature, on_progress)


def make_replica(
    model: Decoder, config: TrainerConfig, ranks: Ranks, zero: Literal[0, 1, 2, 3] = 0, pipeline: Pipeline | DraftPipeline | None = None,
    directory: Path | None = None, is_filled: bool = True,
) -> Replica:
    """Returns ``model`` with the configured optimizer. ``directory``: the run's folder, for offloaded state. ``is_filled``: the model has
    its weights; otherwise, for weights in a file or sharded by ZeRO 3, ``checkpoint.replica_state`` fills them."""
    if ranks.world.size == 1:
        return Replica(ranks, model, make_optimizer(model, config, directory, is_filled))
    is_tied = isinstance(pipeline, Pipeline) and pipeline.has_tied_copy and model.shapes.lora is None
    sum_tied = pipeline.sum_tied_gradient if isinstance(pipeline, Pipeline) and is_tied else None
    # A block of 8-bit codes must not span two ranks.
    aligned = BLOCK if config.optimizer == "adamw8bit" else ALIGNED
    sums = GradientReducer(model, ranks, each_backward=zero >= 2, sum_tied=sum_tied, aligned=aligned)
    if zero == 0:
        return Replica(ranks, model, ReplicatedOptimizer(make_optimizer(model, config, directory), sums, config.max_grad_norm), sums, pipeline)
    make_inner = partial(make_piece_optimizer, model, config, buckets=sums.buckets, directory=directory)
    sharded = ShardedOptimizer(sums, config.max_grad_norm, zero, make_inner, config.offload_parameters == "nvme", is_filled)
    return Replica(ranks, model, sharded, sums, pipeline)
