"""How ranks share the training of one model: the collectives around each matrix, and the tokens of each rank.

Tensor parallelism (Shoeybi et al., 2019) shards matrices by ``layout.sharding.ShardSpec``; with sequence parallelism (Korthikanti et al.,
2022) the residual stream and its norms are sharded by tokens over the same ranks. Context parallelism divides the tokens of a packed batch
into runs.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tandem.layout.sharding import WHOLE, ShardSpec
from tandem.model.attention import PackedContext
from tandem.model.parallel.collective_ops import (
    columns_to_rows,
    copied,
    gathered_columns,
    gathered_rows,
    summed,
    summed_rows,
)
from tandem.model.parallel.context_parallel import SharedContext
from tandem.runtime.collectives.communicator import Communicator

_ALONE = Communicator("alone", 0, 1, None, 0.0)


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The groups of one rank. ``tensor``: shards matrices as described by ``shard_spec``; ``sequence``: the residual stream too. ``context``:
    shards the tokens of a batch. ``expert``: shards the experts of a layer; its ranks see different tokens."""

    shard_spec: ShardSpec = WHOLE
    tensor: Communicator = _ALONE
    context: Communicator = _ALONE
    expert: Communicator = _ALONE
    sequence: bool = False

    @property
    def has_all_rows(self) -> bool:
        """Whether this rank computes all rows of its batch, with whole matrices but those of experts."""
        return self.tensor.size == 1 and self.context.size == 1

    def bounds(self, tokens: int) -> list[int]:
        """Returns the boundaries of the context ranks' runs in a batch of ``tokens``: [size + 1]."""
        return [tokens * rank // self.context.size for rank in range(self.context.size + 1)]

    def residual_rows(self, tokens: int) -> int:
        """Returns the rows of the residual stream on this rank, for a batch of ``tokens``."""
        bounds, rank = self.bounds(tokens), self.context.rank
        own = bounds[rank + 1] - bounds[rank]
        return -(-own // self.tensor.size) if self.sequence else own

    def share(self, context: PackedContext, tokens: int) -> tuple[PackedContext | SharedContext, slice]:
        """Returns the context for attention, and the slice of this rank's tokens."""
        bounds, rank = self.bounds(tokens), self.context.rank
        if self.context.size == 1:
            return context, slice(0, tokens)
        counts = tuple(end - start for start, end in itertools.pairwise(bounds))
        return SharedContext(context.cu_seqlens, context.max_seqlen, self.context, counts), slice(bounds[rank], bounds[rank + 1])


class Collectives(NamedTuple):
    """The collectives around the matrices of a forward pass: ``enter`` on the input of a ``column`` placement, ``before`` on the input of a
    ``row`` placement, ``after`` on its output, ``embedded`` on the embeddings of each rank's own rows of the table (0 for other tokens),
    ``leave`` on the input of the head."""

    enter: Callable[[Tensor], Tensor] = _same
    before: Callable[[Tensor], Tensor] = _same
    after: Callable[[Tensor], Tensor] = _same
    embedded: Callable[[Tensor], Tensor] = _same
    leave: Callable[[Tensor], Tensor] = _same


ALONE = Collectives()


def training_collectives(parallel: ModelParallel | None, tokens: int) -> Collectives:
    """Returns the collectives of one forward pass over ``tokens`` (of this context rank)."""
    if parallel is None or parallel.tensor.size == 1:
        return ALONE
    ranks, deterministic = parallel.tensor, parallel.shard_spec.deterministic
    before = (lambda x: gathered_columns(x, ranks, "inputs of a row-parallel matrix", partial=True)) if deterministic else _same
    if parallel.sequence:
        gather = lambda x: gathered_rows(x, tokens, ranks, "tokens of sequence parallelism")
        if deterministic:
            after = lambda x: columns_to_rows(x, ranks, "outputs of a row-parallel matrix")
        else:
            after = lambda x: summed_rows(x, ranks, "partial products")
        return Collectives(gather, before, after, lambda x: summed_rows(x, ranks, "embeddings"), gather)
    copy = lambda x: copied(x, ranks, "inputs of a column-parallel matrix")
    if deterministic:
        after = lambda x: gathered_columns(x, ranks, "outputs of a row-parallel matrix", partial=False)
    else:
        after = lambda x: summed(x, ranks, "partial products")
    return Collectives(copy, before, after, lambda x: summed(x, ranks, "embeddings"), copy)
