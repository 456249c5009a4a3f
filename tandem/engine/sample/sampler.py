"""The sampler: draws one token per row of logits."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tandem.engine.sample.logits_processors import Position, apply_logits_processors
from tandem.kernels.api import Kernels, SampledRows


class SamplingMetadata(NamedTuple):
    """Sampling settings of R rows, in the form of ``Kernels.sample_rows``: ``temperature[R]``, ``top_p[R]`` and ``min_p[R]`` fp32, ``top_k[R]``
    int64, and the random number of each row's position, ``uniform[R]`` float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


class Sampler:
    """Draws tokens. A row's token depends on its own logits, its position and its request's settings only."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, logits: Tensor, metadata: SamplingMetadata, positions: Sequence[Position] = ()) -> SampledRows:
        """Draws one token from each row of ``logits[R, V]``. ``positions``: the rows whose logits are processed first; raw
        log-probabilities are those of the unprocessed logits."""
        temperature, top_k, top_p, min_p, uniform = metadata
        processed = apply_logits_processors(logits, positions) if positions else logits
        sampled = self._kernels.sample_rows(processed, temperature, top_k, top_p, min_p, uniform)
        if positions:
            sampled = sampled._replace(raw=self._kernels.logits_logprobs(logits, sampled.tokens))
        return sampled
