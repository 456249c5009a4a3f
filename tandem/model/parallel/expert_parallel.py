"""Expert parallelism: each token's row is sent to the ranks of its experts and back (Lepikhin et al., 2021, GShard).

There is no capacity limit, no padding and no dropped token: exactly the rows that the router chose are sent, which may be none. A row has
the same bits as with all experts on one rank, and an expert's rows are in the order of the ranks that sent them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.model.parallel.collective_ops import exchanged
from tandem.runtime.collectives.communicator import Communicator


def on_their_ranks(rows: Tensor, bounds: Tensor, ranks: Communicator, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Computes ``rows[R, H]``, sorted by expert with boundaries ``bounds[E + 1]`` -> the results of ``compute``, [R, N] in the same order.

    ``compute(rows, bounds)`` is given the rows, from all ranks, of the E / size experts on this rank."""
    counts = bounds.diff()
    held = len(counts) // ranks.size
    each = [held] * ranks.size
    arriving = ranks.all_to_all(counts, each, each, "rows for each expert")
    send, receive = counts.view(-1, held).sum(1).tolist(), arriving.view(-1, held).sum(1).tolist()
    arrived = exchanged(rows, send, receive, ranks, "rows to their experts")
    expert = torch.arange(held, device=rows.device).repeat(ranks.size).repeat_interleave(arriving)
    order = expert.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    own_bounds = bounds.new_zeros(held + 1)
    torch.cumsum(arriving.view(-1, held).sum(0), 0, out=own_bounds[1:])
    done = compute(arrived.index_select(0, order), own_bounds)
    return exchanged(done.index_select(0, inverse), receive, send, ranks, "rows from their experts")
