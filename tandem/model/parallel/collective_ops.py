"""Collectives with gradients. Each is a linear map over the ranks' tensors, and its gradient is the transposed map.

A value is on the ranks in one of three placements: *whole* (all ranks hold the same value, and the same gradient of it), *partial* (the
value, or its gradient, is the sum over ranks) or a *share* (rows or columns of it). A function's name says which it takes and returns;
Shoeybi et al. (2019) call ``copied`` f and ``summed`` g, Korthikanti et al. (2022) call ``gathered_rows`` and ``summed_rows`` g and its
conjugate.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.runtime.collectives.communicator import Communicator

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """Applies ``there(x)``, whose gradient is ``back(gradient)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad), None, None


def _apply(x: Tensor, there: Map, back: Map) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return there(x)
    out: Tensor = _Linear.apply(x, there, back)
    return out


def copied(x: Tensor, ranks: Communicator, name: str) -> Tensor:
    """Returns the whole ``x``, of which each rank uses a part in a product: its gradients are partial, and are summed."""
    return _apply(x, lambda x: x.view_as(x), lambda grad: ranks.all_reduce(grad, f"{name} (gradient)"))


def summed(x: Tensor, ranks: Communicator, name: str) -> Tensor:
    """Sums: partial -> whole."""
    return _apply(x, lambda x: ranks.all_reduce(x, name), lambda grad: grad)


def gathered_rows(x: Tensor, rows: int, ranks: Communicator, name: str) -> Tensor:
    """Gathers each rank's rows [ceil(rows / size), ...] -> whole [rows, ...] with partial gradients."""
    return _apply(x, lambda x: _rows_gathered(x, rows, ranks, name), lambda grad: _rows_summed(grad, ranks, f"{name} (gradient)"))


def summed_rows(x: Tensor, ranks: Communicator, name: str) -> Tensor:
    """Reduce-scatters partial [rows, ...] -> this rank's rows [ceil(rows / size), ...] of the sum; those of the last ranks are padded with
    zeros."""
    rows = len(x)
    return _apply(x, lambda x: _rows_summed(x, ranks, name), lambda grad: _rows_gathered(grad, rows, ranks, f"{name} (gradient)"))


def gathered_columns(x: Tensor, ranks: Communicator, name: str, *, partial: bool) -> Tensor:
    """Gathers each rank's columns [rows, n] -> whole [rows, size n]. ``partial``: each rank uses the result for a part of a product, so
    that its gradients are summed; otherwise all use it alike."""

    def back(grad: Tensor) -> Tensor:
        columns = grad.view(len(grad), ranks.size, -1)
        if partial:
            return ranks.reduce_scatter(columns.transpose(0, 1), f"{name} (gradient)")
        return columns[:, ranks.rank]

    return _apply(x, lambda x: ranks.all_gather(x, name).transpose(0, 1).flatten(1), back)


def columns_to_rows(x: Tensor, ranks: Communicator, name: str) -> Tensor:
    """Exchanges each rank's columns [rows, n] -> its rows with all columns, [ceil(rows / size), size n], padded with zeros."""
    rows = len(x)
    return _apply(x, lambda x: _columns_to_rows(x, ranks, name), lambda grad: _rows_to_columns(grad, rows, ranks, f"{name} (gradient)"))


def exchanged(x: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Communicator, name: str) -> Tensor:
    """Does ``Communicator.all_to_all``: rows to each rank -> rows from each rank."""
    return _apply(
        x,
        lambda x: ranks.all_to_all(x, send, receive, name),
        lambda grad: ranks.all_to_all(grad, receive, send, f"{name} (gradient)"),
    )


def gathered_head(x: Tensor, part: int, rows: int, ranks: Communicator, name: str) -> Tensor:
    """Gathers rows of a matrix, ``part`` on each rank and the rest on the last -> whole [rows, ...] with partial gradients."""
    held = len(x)

    def there(x: Tensor) -> Tensor:
        return ranks.all_gather(_lengthened(x, part), name).flatten(0, 1)[:rows]

    def back(grad: Tensor) -> Tensor:
        return ranks.reduce_scatter(_lengthened(grad, part * ranks.size).view(ranks.size, part, -1), f"{name} (gradient)")[:held]

    return _apply(x, there, back)


def gathered_runs(x: Tensor, counts: Sequence[int], ranks: Communicator, name: str) -> Tensor:
    """Gathers each rank's ``counts[rank]`` rows -> whole [sum(counts), ...] with partial gradients."""
    longest, bounds = max(counts), list(itertools.accumulate(counts, initial=0))

    def back(grad: Tensor) -> Tensor:
        parts = [_lengthened(grad[start:end], longest) for start, end in itertools.pairwise(bounds)]
        return ranks.reduce_scatter(torch.stack(parts), f"{name} (gradient)")[: counts[ranks.rank]]

    return _apply(x, lambda x: _runs_gathered(x, counts, ranks, name), back)


def joined_rows(x: Tensor, counts: Sequence[int], ranks: Communicator, name: str) -> Tensor:
    """Gathers each rank's ``counts[rank]`` rows -> whole [sum(counts), ...], which all ranks use alike."""
    first = sum(counts[: ranks.rank])
    return _apply(x, lambda x: _runs_gathered(x, counts, ranks, name), lambda grad: grad[first : first + counts[ranks.rank]])


def _rows_gathered(x: Tensor, rows: int, ranks: Communicator, name: str) -> Tensor:
    return ranks.all_gather(x, name).flatten(0, 1)[:rows]


def _rows_summed(x: Tensor, ranks: Communicator, name: str) -> Tensor:
    return ranks.reduce_scatter(_padded(x, ranks.size).view(ranks.size, -1, *x.shape[1:]), name)


def _columns_to_rows(x: Tensor, ranks: Communicator, name: str) -> Tensor:
    padded = _padded(x, ranks.size)
    share = len(padded) // ranks.size
    counts = [share] * ranks.size
    return ranks.all_to_all(padded, counts, counts, name).view(ranks.size, share, -1).transpose(0, 1).flatten(1)


def _rows_to_columns(x: Tensor, rows: int, ranks: Communicator, name: str) -> Tensor:
    share, width = x.shape
    counts = [share] * ranks.size
    parts = x.view(share, ranks.size, width // ranks.size).transpose(0, 1).flatten(0, 1)
    return ranks.all_to_all(parts, counts, counts, name)[:rows]


def _runs_gathered(x: Tensor, counts: Sequence[int], ranks: Communicator, name: str) -> Tensor:
    gathered = ranks.all_gather(_lengthened(x, max(counts)), name)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _padded(x: Tensor, size: int) -> Tensor:
    return _lengthened(x, len(x) + -len(x) % size)


def _lengthened(x: Tensor, rows: int) -> Tensor:
    """Returns ``x`` padded with zeros to ``rows`` rows."""
    return x.contiguous() if len(x) == rows else F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows - len(x)))
