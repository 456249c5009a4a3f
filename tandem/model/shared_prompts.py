"""Packed sequences that share a prompt, which is in the flat batch once.

The tokens of a prompt are computed with its first sequence; of the others the batch has the tokens after the prompt alone, which attend to the
keys and values of those rows. All of the model but the attention sees a flat batch of fewer tokens. A token's results are functions of it and of
the tokens before it (the invariance law of ``kernels.api``), so they have the bits of a batch in which every sequence has its own copy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class SharedPrompts(NamedTuple):
    """``rows[K]`` int64: the rows of the flat batch that the sequences attend to, sequence after sequence. ``query_start[S + 1]`` int32: sequence s's own
    rows are ``query_start[s]:query_start[s + 1]``, the last of those that it attends to. ``places``: entry n has the places in ``rows`` of the rows that
    are there more than n times, where each is for the (n + 1)-th time, ascending by row (int64)."""

    rows: Tensor
    query_start: Tensor
    places: tuple[Tensor, ...]


def shared_prompts(rows: Tensor, query_start: Tensor) -> SharedPrompts:
    """Returns the ``SharedPrompts`` of a batch each of whose rows is in ``rows``."""
    order, counts = rows.argsort(stable=True), rows.bincount()
    times = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return SharedPrompts(rows, query_start, tuple(order[times == n] for n in range(int(counts.max()))))


def gathered_rows_of(x: Tensor, prompts: SharedPrompts) -> Tensor:
    """Returns the rows of ``x[T, ...]`` that the sequences attend to: [K, ...]."""
    return _Gathered.apply(x, prompts)  # type: ignore[no-any-return, no-untyped-call]


class _Gathered(torch.autograd.Function):
    """The gradients of a row that is in several sequences are added in the order of the sequences, on any device: no addition has a row twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, prompts: SharedPrompts) -> Tensor:
        ctx.prompts = prompts
        return x.index_select(0, prompts.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows, _, (first, *others) = ctx.prompts
        total = grad.index_select(0, first)
        for places in others:
            total.index_add_(0, rows.index_select(0, places), grad.index_select(0, places))
        return total, None
