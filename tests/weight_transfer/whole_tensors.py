"""Whole tensors of one process in the form that ``WeightWriter`` expects."""

from collections.abc import Sequence

from torch import Tensor

from tandem.layout.shard_offsets import whole_offsets
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.weight_transfer.convert import ConvertedWeights, place_shards


def converted(tensors: Sequence[tuple[str, Tensor]]) -> ConvertedWeights:
    shapes = [tuple(tensor.shape) for _, tensor in tensors]
    shards = [
        WeightShard(name, shape, whole_offsets(shape), tensor.dtype, lambda tensor=tensor: tensor)
        for (name, tensor), shape in zip(tensors, shapes, strict=True)
    ]
    return place_shards(alone().world, shards)
