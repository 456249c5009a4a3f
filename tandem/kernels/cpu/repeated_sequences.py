"""Which tokens of a batch are the same, for layers that compute them once (``cpu.trained_layers``)."""

import itertools
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.cpu.repeated_rows import RepeatedRows
from tandem.kernels.trained_layers import Beginnings
from tandem.runtime.machine.tensor_bytes import bytes_view


class WantedTokens(NamedTuple):
    """The W tokens of T whose hidden states are wanted. ``tokens[W]`` int64, ascending, and ``distinct`` int64, those of the distinct tokens that they are
    (``None``: all). ``bounds[S + 1]`` int64: of the W tokens, those of each sequence. ``rows``: the distinct one that each of the W tokens is."""

    tokens: Tensor | None
    distinct: Tensor | None
    bounds: Tensor
    rows: RepeatedRows


class DistinctSequences(NamedTuple):
    """Sequences that differ in their tokens or gradients. ``all_rows`` and ``wanted_rows``: the rows of the T and W tokens. ``bounds`` int32: where the
    distinct sequences begin among the tokens that have a gradient of their own; ``places`` int64: those of the wanted ones (``None``: all are)."""

    all_rows: RepeatedRows
    wanted_rows: RepeatedRows
    bounds: Tensor
    places: Tensor | None


def wanted_tokens(beginnings: Beginnings, wanted: Tensor | None) -> WantedTokens:
    """Returns the ``wanted`` tokens of sequences with ``beginnings``."""
    bounds = beginnings.cu_seqlens.long()
    if wanted is None:
        return WantedTokens(None, None, bounds, RepeatedRows(beginnings.rows, None, None))
    distinct, places = beginnings.rows[wanted].unique(return_inverse=True)
    return WantedTokens(wanted, distinct, torch.searchsorted(wanted, bounds), RepeatedRows(places, None, None))


def distinct_sequences(beginnings: Beginnings, wanted: WantedTokens, grad: Tensor) -> DistinctSequences:
    """Finds sequences of the same tokens whose rows of ``grad[W, H]`` have the same bits: what is computed of one is that of the other."""
    bounds = beginnings.cu_seqlens.long()
    same = _representatives(beginnings, wanted, grad)
    is_own = same == torch.arange(len(same))
    if bool(is_own.all()):
        return DistinctSequences(RepeatedRows(beginnings.rows, None, None), wanted.rows, beginnings.cu_seqlens, wanted.tokens)
    own, first = _once(bounds, same, is_own)
    wanted_own, wanted_first = _once(wanted.bounds, same, is_own)
    places = None if wanted.tokens is None else own[wanted.tokens[wanted_first]]
    lengths = bounds.diff()[is_own]
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    return DistinctSequences(
        RepeatedRows(beginnings.rows, own, first), RepeatedRows(wanted.rows.saved, wanted_own, wanted_first), starts, places
    )


def _representatives(beginnings: Beginnings, wanted: WantedTokens, grad: Tensor) -> Tensor:
    """Returns for each sequence the first one that is the same, int64 [S]."""
    bounds, at = beginnings.cu_seqlens.tolist(), wanted.bounds.tolist()
    # A distinct token is one beginning: sequences that end with it are the same.
    ends = beginnings.rows[beginnings.cu_seqlens[1:].long() - 1].tolist()
    tokens = None if wanted.tokens is None else wanted.tokens.tolist()
    grad = grad.contiguous()
    values, row, firsts, same = bytes_view(grad), grad[:1].nbytes, dict[tuple[int, tuple[int, ...], bytes], int](), list[int]()
    repeated = {end for end, count in Counter(ends).items() if count > 1}
    for number, (end, (first, last)) in enumerate(zip(ends, itertools.pairwise(at), strict=True)):
        if end not in repeated:
            same.append(number)
            continue
        predicting = () if tokens is None else tuple(token - bounds[number] for token in tokens[first:last])
        same.append(firsts.setdefault((end, predicting, bytes(values[first * row : last * row])), number))
    return torch.tensor(same)


def _once(bounds: Tensor, same: Tensor, is_own: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each row of sequences ``bounds[S + 1]`` its place among the rows of those that ``is_own[S]``, which are the ones that the others are the
    ``same[S]`` as; and the rows at those places. int64."""
    lengths = bounds.diff()
    owned = torch.where(is_own, lengths, 0)
    starts = (owned.cumsum(0) - owned)[same]
    rows = torch.arange(int(bounds[-1])) + (starts - bounds[:-1]).repeat_interleave(lengths)
    return rows, is_own.repeat_interleave(lengths).nonzero().squeeze(1)
