"""Packed sequences that share a prompt, which is in the flat batch once.

The tokens of a prompt are computed with its first sequence; of the others the batch has the tokens after the prompt alone, which attend to the
keys and values of those rows. All of the model but the attention sees a flat batch of fewer tokens. A token's results are functions of it and of
the tokens before it (the invariance law of ``kernels.api``), so they have the bits of a batch in which every sequence has its own copy.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

Run = tuple[int, int]
"""Rows ``start:end`` of the flat batch."""


class SharedPrompts(NamedTuple):
    """``runs``: the rows that the sequences attend to, sequence after sequence. ``query_start[S + 1]`` int32: sequence s's own rows are
    ``query_start[s]:query_start[s + 1]``, the last of those that it attends to."""

    runs: tuple[Run, ...]
    query_start: Tensor


def gathered_runs_of(x: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """Returns the rows ``runs`` of ``x[T, ...]``, one run after the other."""
    return _Gathered.apply(x, runs)  # type: ignore[no-any-return, no-untyped-call]


class _Gathered(torch.autograd.Function):
    """The gradients of a row that is in several runs are added in the order of the runs, on any device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, runs: tuple[Run, ...]) -> Tensor:
        ctx.runs, ctx.rows = runs, len(x)
        return torch.cat([x[start:end] for start, end in runs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.new_zeros(ctx.rows, *grad.shape[1:])
        edges = itertools.accumulate((end - start for start, end in ctx.runs), initial=0)
        for (start, end), (first, last) in zip(ctx.runs, itertools.pairwise(edges), strict=True):
            total[start:end] += grad[first:last]
        return total, None
