"""The value head: one number for each hidden state, as a reward model scores a sequence and a critic the states of one."""

import itertools

from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.kernels.mixed import whole_precision
from tandem.kernels.reference_dtype import compute_dtype
from tandem.model.parallel.collective_ops import joined_rows
from tandem.model.parallel.model_parallel import ModelParallel


def values_of(
    kernels: Kernels, parallel: ModelParallel | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, tokens: int
) -> Tensor:
    """Returns ``hidden[r] . weight[1, H] + bias[1]`` for each of ``rows[R]`` of a packed batch of ``tokens`` tokens, in the dtype of log-probabilities.

    ``hidden``: this rank's states, as ``Decoder.forward`` returns them. Every rank holds the head; each multiplies the states that it has, so that
    the head's gradient is placed as that of the final norm, and all ranks return all values. Products are not rounded to the precision of the
    layers', because a value has no other values to be compared with that are rounded alike."""
    if parallel is None:
        return _dots(kernels, hidden.index_select(0, rows), weight, bias)
    own = _dots(kernels, hidden, weight, bias)
    bounds = parallel.bounds(tokens)
    counts = [after - before for before, after in itertools.pairwise(bounds)]
    if parallel.sequence:
        # The last ranks' states are padded.
        padded = parallel.residual_rows(tokens)
        own = joined_rows(own, [padded] * parallel.tensor.size, parallel.tensor, "values")[: counts[parallel.context.rank]]
    if parallel.context.size > 1:
        own = joined_rows(own, counts, parallel.context, "values")
    return own.index_select(0, rows)


def label_scores(kernels: Kernels, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``hidden[R] . weight[L, H] + bias[L]``, a number [R, L] for each label, with the precision of ``values_of``."""
    return whole_precision(kernels).linear(hidden.to(weight.dtype), weight, bias).to(compute_dtype(weight.dtype))


def _dots(kernels: Kernels, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return label_scores(kernels, hidden, weight, bias).squeeze(1)
