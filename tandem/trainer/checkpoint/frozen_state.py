"""The checkpoint shards of a model without an optimizer whose weights are part of a run's state: a reference that follows the actor."""

import torch

from tandem.trainer.checkpoint.format.shard import Shard
from tandem.trainer.checkpoint.model_state import WEIGHTS, named_shards, parts_of_replica, run_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.parallel.replica import FrozenReplica
from tandem.types import UserError


class FrozenState:
    """The shards of ``replica``. Every rank makes one for the lifetime of the replica and calls ``load`` together."""

    def __init__(self, replica: FrozenReplica) -> None:
        self.replica, self._parts = replica, parts_of_replica(replica)

    def shards(self) -> list[Shard]:
        """Returns the weights that this rank holds, as live views."""
        model, sharded = self.replica.model, self.replica.shards
        if sharded is None:
            return list(named_shards(self._parts, WEIGHTS, {name: p.detach() for name, p in model.named_parameters()}, model))
        return [shard for name, first, values in sharded.runs() for shard in run_shards(self._parts, WEIGHTS, name, first, values)]

    @torch.no_grad()
    def load(self, contents: Contents) -> None:
        """Loads the weights. Raises ``UserError`` for a checkpoint without them, or of another model; nothing is changed then."""
        held = self.shards()
        # Read into host memory first, so that a damaged file changes nothing.
        read = [shard._replace(tensor=torch.empty_like(shard.tensor, device="cpu")) for shard in held]
        try:
            contents.read(read)
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another reference: {error}") from None
        for shard, own in zip(held, read, strict=True):
            shard.tensor.copy_(own.tensor)
