"""ZeRO stage 3 for a model without an optimizer, such as the reference: weights are sharded, and there is nothing else to shard."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.trainer.offload.reserved_memory import PagePool
from tandem.trainer.parallel.flat_buffer import flat_buffers
from tandem.trainer.parallel.placement import placement
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.zero_shard import Shard
from tandem.trainer.parallel.zero_unshard import ZeroUnshard


class FrozenShards:
    """This rank's part of the weights of ``model``, divided among the ranks that hold the same ones; a forward pass gathers one layer after another.
    ``is_filled``: the model has its weights; otherwise ``fill`` sets them."""

    def __init__(self, model: Decoder, ranks: Ranks, is_filled: bool) -> None:
        buckets = flat_buffers(model.named_parameters(), lambda name: placement(model, name).replicas, lambda group: ranks.groups[group])
        model.requires_grad_(False)
        pages = PagePool()
        self.shards = [Shard(bucket, True, None, is_filled, pages) for bucket in buckets]
        ZeroUnshard(self.shards, model)

    @torch.no_grad()
    def fill(self, name: str, first: int, values: Tensor) -> None:
        """Takes from ``values``, the weights of parameter ``name`` from element ``first`` on, those of this rank's part."""
        for shard in self.shards:
            for run in shard.bucket.own_runs(name, first, first + values.numel()):
                shard.own[run.at : run.at + run.last - run.first] = values[run.first - first : run.last - first]

    def runs(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yields this rank's part as (parameter, its first element here, the elements), live."""
        for shard in self.shards:
            for segment in shard.bucket.segments():
                yield segment.name, segment.first, shard.own[segment.at : segment.at + segment.last - segment.first]

    def parts(self) -> list[Tensor]:
        """The tensors that hold this rank's part."""
        return [shard.own for shard in self.shards]

    def reserve(self) -> None:
        """Gives every parameter memory, without its values, until ``reshard``."""
        for shard in self.shards:
            shard.reserve()

    def reshard(self) -> None:
        """Frees the gathered weights."""
        for shard in self.shards:
            shard.free()
