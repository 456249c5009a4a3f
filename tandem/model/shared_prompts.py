"""Packed sequences that begin with the same tokens, those of a prompt at least, which are in the flat batch once.

They are computed with the first sequence that has them; of the others the batch has the tokens after them alone, which attend to the
keys and values of those rows. All of the model but the attention sees a flat batch of fewer tokens. A token's results are functions of it and of
the tokens before it (the invariance law of ``kernels.api``), so they have the bits of a batch in which every sequence has its own copy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class SharedPrompts(NamedTuple):
    """``rows[K]`` int64: the rows of the flat batch that the sequences attend to, sequence after sequence. ``query_start[S + 1]`` int32: sequence s's own
    rows are ``query_start[s]:query_start[s + 1]``, the last of those that it attends to."""

    rows: Tensor
    query_start: Tensor


def gathered_rows_of(x: Tensor, prompts: SharedPrompts) -> Tensor:
    """Returns the rows of ``x[T, ...]`` that the sequences attend to: [K, ...]."""
    return _Gathered.apply(x, prompts)  # type: ignore[no-any-return, no-untyped-call]


class _Gathered(torch.autograd.Function):
    """The gradients of a row that is in several sequences are added in a fixed order, on a CPU that of the sequences."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, prompts: SharedPrompts) -> Tensor:
        ctx.rows, ctx.count = prompts.rows, len(x)
        return x.index_select(0, prompts.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # Adding to -0 changes nothing. index_add_ has the order of the rows on a CPU but none on a GPU, where index_put_ sorts them first.
        total = grad.new_full((ctx.count, *grad.shape[1:]), -0.0)
        if grad.is_cpu:
            return total.index_add_(0, ctx.rows, grad), None
        return total.index_put_((ctx.rows,), grad, accumulate=True), None
