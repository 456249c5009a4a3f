"""The rotary embeddings of a model, as plain data. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of rotary frequencies. ``kind`` and the fields follow Hugging Face's ``rope_scaling``.

    ``default``: none. ``linear``: positions divided by ``factor``. ``llama3``: the four ``llama3`` fields.
    ``yarn``: ``factor``, ``original_max_position_embeddings``, ``beta_fast``, ``beta_slow``, ``attention_factor``
    (``None``: 0.1 ln(factor) + 1) and the two ``mscale``s (0: not given). ``longrope``: ``original_max_position_embeddings``, ``attention_factor`` (``None``:
    of ``factor``), and the divisors of each pair's frequency, ``short_factors`` in runs of up to that many tokens and ``long_factors`` in longer ones.
    """

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


NO_SCALING = RopeScaling()
"""Frequencies as they are."""


class Rotary(NamedTuple):
    """A rotary embedding."""

    theta: float
    scaling: RopeScaling
