"""The shards of a model that Megatron-Core trains: what checkpoints and engines have of it, under Hugging Face's names."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.backends.megatron.optimizer import OwnRun
from tandem.backends.megatron.parts import parts_of_rank
from tandem.backends.megatron.replica import MegatronReplica
from tandem.layout.parameters import parameters
from tandem.trainer.checkpoint.format.shard import Shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, run_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.optimizers.adamw import MOMENTS
from tandem.types import UserError


class MegatronState:
    """The checkpoints are Tandem's own, so that any mesh of either trainer reads them: the fp32 weights that are updated and AdamW's moments, each in
    parts of Hugging Face's tensors. Fused tensors (q, k and v; gate and up) are not copied apart: a part is a view of its rows."""

    def __init__(self, replica: MegatronReplica) -> None:
        self.replica = replica
        self._parts = parts_of_rank(replica.model.shapes, replica.ranks, len(replica.network))

    @property
    def folder(self) -> Path | None:
        """``None``: all state is in memory."""
        return None

    def whole(self) -> Iterable[tuple[str, Tensor]] | None:
        """Returns ``None``: a fused tensor has to be put together, as from a checkpoint."""
        return None

    def _weights(self) -> Iterator[Shard]:
        for run in self.replica.optimizer.runs():
            yield from self._of_run(WEIGHTS, run, run.weights)

    def _moments(self) -> Iterator[Shard]:
        for kind, run, moment in self.replica.optimizer.moments():
            yield from self._of_run(kind, run, moment)

    def _of_run(self, kind: str, run: OwnRun, values: Tensor) -> list[Shard]:
        return run_shards(self._parts, kind, run.parameter, run.first, values.detach().view(-1))

    def shards(self) -> list[Shard]:
        return [*self._weights(), *self._moments()]

    def load(self, contents: Contents, updates: int) -> None:
        names, kinds = {name for name, _ in parameters(self.replica.model.shapes)}, (WEIGHTS, *MOMENTS)
        strange = [key for key in contents.held if key.name not in names or key.state not in kinds]
        try:
            if strange:
                raise UserError(f"it has '{strange[0]}'")
            contents.check(list(self._weights()))
            self.replica.optimizer.make_moments(updates)
            contents.read(self.shards())
            self.replica.optimizer.publish()
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: {error}") from None

    def weight_shards(self) -> list[WeightShard]:
        """Returns this rank's shards of the weights, under the distributed optimizer its runs of them, without the last pipeline stage's copy of a tied
        embedding."""
        is_copy = lambda run: run.parameter.endswith("output_layer.weight") and self.replica.model.shapes.tie_word_embeddings
        runs = [run for run in self.replica.optimizer.runs() if not is_copy(run)]
        shards = [shard for run in runs for shard in self._of_run(WEIGHTS, run, run.weights)]
        return [WeightShard(s.key.name, s.whole, s.offsets, s.tensor.dtype, partial(_same, s.tensor)) for s in shards]

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the weights of a whole model by Hugging Face name, one tensor in memory at a time; padding of the vocabulary becomes 0. Raises
        ``UserError`` if one is missing or of another shape."""
        whole, own = {part.name: part.whole for part in self._parts}, dict[str, list[Shard]]()
        for shard in self._weights():
            own.setdefault(shard.key.name, []).append(shard)
        for weights in self.replica.weights():
            weights.zero_()
        for name, tensor in tensors:
            size = whole.pop(name, tuple(tensor.shape))
            if tuple(tensor.shape) != size:
                raise UserError(f"its '{name}' is {list(tensor.shape)}; the architecture has {list(size)}")
            for shard in own.get(name, ()):
                shard.tensor.copy_(tensor[shard.offsets.slices])
        if whole:
            raise UserError(f"it has no '{next(iter(whole))}'")
        self.replica.optimizer.publish()


def _same(weights: Tensor) -> Tensor:
    return weights
