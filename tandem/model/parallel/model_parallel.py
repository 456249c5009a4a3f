"""How the ranks that train one model share it: the collectives around each matrix, and the tokens of each rank.

Tensor parallelism (Shoeybi et al., 2019) cuts matrices as ``layout.sharding.ShardSpec`` says; with sequence parallelism (Korthikanti
et al., 2022) the residual stream and its norms are cut by tokens between the same ranks. Context parallelism divides the
tokens of a packed batch in runs.
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
    """The groups of one rank. ``tensor``: with whom it shares matrices, cut by ``cut``; ``sequence``: the residual stream too.
    ``context``: with whom it shares the tokens of a batch. ``expert``: with whom it shares the experts of a layer; those see
    different tokens."""

    cut: ShardSpec = WHOLE
    tensor: Communicator = _ALONE
    context: Communicator = _ALONE
    expert: Communicator = _ALONE
    sequence: bool = False

    def bounds(self, tokens: int) -> list[int]:
        """Where the context ranks' runs of a batch of ``tokens`` begin, and the last ends: [size + 1]."""
        return [tokens * rank // self.context.size for rank in range(self.context.size + 1)]

    def residual_rows(self, tokens: int) -> int:
        """Rows of the residual stream on this rank, of a batch of ``tokens``."""
        bounds, rank = self.bounds(tokens), self.context.rank
        own = bounds[rank + 1] - bounds[rank]
        return -(-own // self.tensor.size) if self.sequence else own

    def share(self, context: PackedContext, tokens: int) -> tuple[PackedContext | SharedContext, slice]:
        """What attention is given, and this rank's run of the tokens."""
        bounds, rank = self.bounds(tokens), self.context.rank
        if self.context.size == 1:
            return context, slice(0, tokens)
        counts = tuple(end - start for start, end in itertools.pairwise(bounds))
        return SharedContext(context.cu_seqlens, context.max_seqlen, self.context, counts), slice(bounds[rank], bounds[rank + 1])


class Collectives(NamedTuple):
    """What a forward pass does around its matrices: ``enter`` to the input of a ``column`` placement, ``before`` to the input of
    a ``row`` placement, ``after`` to its output, ``embedded`` to the embeddings that each rank found of its own rows of the
    table (0 for other tokens), ``leave`` to the input of the head."""

    enter: Callable[[Tensor], Tensor] = _same
    before: Callable[[Tensor], Tensor] = _same
    after: Callable[[Tensor], Tensor] = _same
    embedded: Callable[[Tensor], Tensor] = _same
    leave: Callable[[Tensor], Tensor] = _same


ALONE = Collectives()


def training_collectives(parallel: ModelParallel | None, tokens: int) -> Collectives:
    """Those of one forward pass over ``tokens`` (of this context rank)."""
    if parallel is None or parallel.tensor.size == 1:
        return ALONE
    ranks, deterministic = parallel.tensor, parallel.cut.deterministic
    before = (lambda x: gathered_columns(x, ranks, "inputs of a row-cut matrix", partial=True)) if deterministic else _same
    if parallel.sequence:
        gather = lambda x: gathered_rows(x, tokens, ranks, "tokens of sequence parallelism")
        if deterministic:
            after = lambda x: columns_to_rows(x, ranks, "outputs of a row-cut matrix")
        else:
            after = lambda x: summed_rows(x, ranks, "partial products")
        return Collectives(gather, before, after, lambda x: summed_rows(x, ranks, "embeddings"), gather)
    copy = lambda x: copied(x, ranks, "inputs of a column-cut matrix")
    if deterministic:
        after = lambda x: gathered_columns(x, ranks, "outputs of a row-cut matrix", partial=False)
    else:
        after = lambda x: summed(x, ranks, "partial products")
    return Collectives(copy, before, after, lambda x: summed(x, ranks, "embeddings"), copy)
