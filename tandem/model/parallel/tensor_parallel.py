"""Communication between the tensor-parallel ranks of an engine. Sums are taken in rank order, so that they do not depend on the order of
arrival."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.layout.sharding import ShardSpec
from tandem.model.parallel.model_parallel import ALONE, Collectives
from tandem.runtime.collectives.communicator import connect

PATIENCE_S = 1e8
"""Timeout in seconds of a collective over gloo: none. The owner of the ranks ends one that does not answer within its deadline, from which it
takes out pauses of the whole engine; gloo would count them."""


class RankGroup:
    """The ranks of one model, as seen by ``shard_spec.rank``. Every rank must call each method, in the same order."""

    def __init__(self, shard_spec: ShardSpec, rendezvous: Path, device: torch.device, deadline_s: float) -> None:
        """Joins the other ranks through the file ``rendezvous``, which only they can read. A dead rank ends a call with ``RunError`` at
        once. ``deadline_s``: of joining, and of collectives between GPUs."""
        self.shard_spec = shard_spec
        store = dist.FileStore(str(rendezvous), shard_spec.size)
        self._ranks = connect("tensor", shard_spec.rank, shard_spec.size, store, device, deadline_s, PATIENCE_S)

    def close(self) -> None:
        """Leaves the group, for which ``rendezvous`` must still be there: the store opens its path once more."""
        self._ranks.close()

    def columns(self, x: Tensor) -> Tensor:
        """Returns every rank's ``x[T, N]`` concatenated: [T, size N]."""
        return self._ranks.all_gather(x, "columns").transpose(0, 1).flatten(1)

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's ``x``, in rank order."""
        return self._ranks.all_reduce(x, "partial products")

    def first_rank_columns(self, x: Tensor, part: int, width: int) -> Tensor:
        """Returns on rank 0 every rank's ``x[T, n]`` concatenated, [T, width], where all but the last have n = ``part``; on other ranks
        ``x``."""
        padded = x if x.shape[1] == part else torch.nn.functional.pad(x, (0, part - x.shape[1]))
        parts = self._ranks.gather(padded, 0, "logits")
        return torch.cat(parts, dim=1)[:, :width].contiguous() if parts else x

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Sends ``tensors`` to ``rank``, which must call ``receive``."""
        for tensor in tensors:
            self._ranks.send(tensor, rank, "weights").wait()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fills contiguous ``tensors`` with those sent by rank 0."""
        for tensor in tensors:
            self._ranks.receive(tensor, 0, "weights").wait()


def collectives(group: RankGroup | None) -> Collectives:
    """Returns the engine's collectives. Deterministic: gather inputs, and the columns of outputs. Otherwise: sum the partial products."""
    if group is None:
        return ALONE
    if group.shard_spec.deterministic:
        return Collectives(before=group.columns, after=group.columns, embedded=group.total)
    return Collectives(after=group.total, embedded=group.total)
