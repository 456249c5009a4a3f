"""The shards of a model that Megatron-Core trains: what checkpoints and engines have of it, under Hugging Face's names."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.backends.megatron.network import mesh_of
from tandem.backends.megatron.parts import parts_of
from tandem.backends.megatron.replica import MegatronReplica
from tandem.layout.shapes import parameters
from tandem.model.megatron.layout import MegatronRank
from tandem.trainer.checkpoint.codes import Part
from tandem.trainer.checkpoint.format.shard import Shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, run_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.optimizers.adamw import MOMENTS
from tandem.types import UserError


class MegatronState:
    """The checkpoints are Tandem's own, so that any mesh of either trainer reads them: weights and AdamW's moments, each in parts of Hugging Face's tensors.
    Fused tensors (q, k and v; gate and up) are not copied apart: a part is a view of its rows."""

    def __init__(self, replica: MegatronReplica) -> None:
        self.replica = replica
        places = (replica.ranks.groups[axis].rank for axis in ("tensor", "pipeline", "expert"))
        self._parts = parts_of(replica.model.shapes, mesh_of(replica.ranks), MegatronRank(*places))
        self._parameters: dict[str, Tensor] = dict(replica.each_parameter())

    @property
    def folder(self) -> Path | None:
        """``None``: all state is in memory."""
        return None

    def whole(self) -> Iterable[tuple[str, Tensor]] | None:
        """Returns ``None``: a fused tensor has to be put together, as from a checkpoint."""
        return None

    def _weights(self) -> Iterator[Shard]:
        for name, parameter in self._parameters.items():
            yield from run_shards(self._parts, WEIGHTS, name, 0, parameter.view(-1))

    def _moments(self) -> Iterator[Shard]:
        for kind, run, moment in self.replica.optimizer.moments():
            yield from run_shards(self._parts, kind, run.parameter, run.first, moment.view(-1))

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
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: {error}") from None

    def weight_shards(self) -> list[WeightShard]:
        """Returns this rank's shards of the weights, without the last pipeline stage's copy of a tied embedding."""
        shapes = self.replica.model.shapes
        is_copy = lambda part: part.parameter == "output_layer.weight" and shapes.tie_word_embeddings
        dtype = self.replica.model.dtype
        return [WeightShard(p.name, p.whole, p.offsets, dtype, partial(self._view, p)) for p in self._parts if not is_copy(p)]

    def _view(self, part: Part) -> Tensor:
        return self._parameters[part.parameter].view(-1)[part.first : part.first + part.offsets.numel].view(part.offsets.shape)

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the weights of a whole model by Hugging Face name, one tensor in memory at a time; padding of the vocabulary becomes 0. Raises
        ``UserError`` if one is missing or of another shape."""
        parts_of_name: dict[str, list[Part]] = {}
        for part in self._parts:
            parts_of_name.setdefault(part.name, []).append(part)
        for parameter in self._parameters.values():
            parameter.zero_()
        for name, tensor in tensors:
            for part in parts_of_name.pop(name, ()):
                if tuple(tensor.shape) != part.whole:
                    raise UserError(f"its '{name}' is {list(tensor.shape)}; the architecture has {list(part.whole)}")
                self._view(part).copy_(tensor[part.offsets.slices])
        if parts_of_name:
            raise UserError(f"it has no '{next(iter(parts_of_name))}'")
