"""A model and its optimizer as one rank has them: alone, beside replicas, or cut by ZeRO."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.trainer.optimizer import Optimizer, OptimizerState
from tandem.trainer.optimizers import make_optimizer
from tandem.trainer.parallel.data import GradientSums, ReplicatedOptimizer
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.zero import ShardedOptimizer


@dataclass(frozen=True, slots=True)
class Gathered:
    """A state that was brought together before it is written."""

    held: OptimizerState

    def state(self) -> OptimizerState:
        return self.held


@dataclass(frozen=True, slots=True)
class Replica:
    """``sums``: the gradients' sums over ranks (``None``: this process is alone)."""

    ranks: Ranks
    model: Decoder
    optimizer: Optimizer
    sums: GradientSums | None = None

    @property
    def passes_together(self) -> bool:
        """Whether ranks exchange something inside a forward and backward pass, so that all must go through as many."""
        return (self.sums is not None and self.sums.each_backward) or self.ranks.groups["expert"].size > 1

    def whole(self, changes: bool = False) -> AbstractContextManager[None]:
        """Every rank holds all weights (of its part of the model) inside; ``changes``: they are written there."""
        optimizer = self.optimizer
        return optimizer.whole(changes) if isinstance(optimizer, ShardedOptimizer) else nullcontext()

    def gathered_state(self) -> Gathered:
        """The optimizer's whole state, on the first rank; all ranks must ask for it."""
        return Gathered(self.optimizer.state())

    def rest(self) -> None:
        """Give back what a forward pass without a backward left gathered."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.rest()


def make_replica(model: Decoder, config: TrainerConfig, ranks: Ranks, zero: Literal[0, 1, 2, 3] = 0) -> Replica:
    """``model``, whose weights are there, with the optimizer that ``config`` names."""
    if ranks.world.size == 1:
        return Replica(ranks, model, make_optimizer(model, config))
    sums = GradientSums(model, ranks, each_backward=zero >= 2)
    if zero == 0:
        return Replica(ranks, model, ReplicatedOptimizer(make_optimizer(model, config), sums, config.max_grad_norm), sums)
    assert config.optimizer == "adamw", "other optimizers cannot be cut anywhere"
    return Replica(ranks, model, ShardedOptimizer(sums, config, zero), sums)
