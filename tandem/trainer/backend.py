"""What a trainer backend is to reinforcement learning and to the pod: the waist between them and what trains the weights.

Tandem's own trainer implements it by ``parallel.replica.Replica`` and ``checkpoint.replica_state.ReplicaState``. Losses, packing, metrics, guards, checkpoints
and weight updates are the same code for every backend.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from tandem.trainer.checkpoint.format.shard import Shard
from tandem.trainer.logprobs import Inferring
from tandem.trainer.step import ForwardBackward, GradientSums, StepOptimizer

if TYPE_CHECKING:
    from tandem.trainer.checkpoint.read import Contents
    from tandem.trainer.checkpoint.replica_state import WeightShard


class TrainedReplica(Inferring, Protocol):
    """One rank's part of a model that is trained. ``sums`` is ``None`` for a single process that sums nothing."""

    @property
    def optimizer(self) -> StepOptimizer: ...

    @property
    def sums(self) -> GradientSums | None: ...

    @property
    def forward_backward(self) -> ForwardBackward:
        """The function that runs the forward and backward passes of micro-batches."""
        ...

    def weights(self) -> list[Tensor]:
        """Returns the tensors in memory that hold this rank's weights, between two steps. Several may share storage."""
        ...

    def moments(self) -> list[Tensor]:
        """Returns the tensors in memory that hold this rank's optimizer state."""
        ...

    def drop_gradients(self) -> int:
        """Drops gradients between two steps. Returns the bytes that this frees."""
        ...

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter of this rank's part of the model by the backend's name. Every rank must take all."""
        ...

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the gradients that this rank has once they are summed over ranks, with what they are of."""
        ...


class TrainedState(Protocol):
    """The shards that a replica holds of a checkpoint, and of the weights sent to engines, under Hugging Face's names. Every rank makes one for the
    lifetime of the replica and calls ``load`` together."""

    @property
    def replica(self) -> TrainedReplica: ...

    @property
    def folder(self) -> Path | None:
        """The folder of the file that holds state which is not in memory; ``None``: all is in memory."""
        ...

    def shards(self) -> list[Shard]:
        """Returns weights and moments as live views."""
        ...

    def load(self, contents: "Contents", updates: int) -> None:
        """Loads weights and moments after ``updates`` updates. Raises ``UserError`` for a checkpoint of another model or optimizer."""
        ...

    def weight_shards(self) -> "list[WeightShard]":
        """Returns this rank's shards of the weights, each read on demand."""
        ...

    def whole(self) -> Iterable[tuple[str, Tensor]] | None:
        """Returns every tensor that training changes by its Hugging Face name, in their order; ``None`` if this rank has only a part of them."""
        ...
