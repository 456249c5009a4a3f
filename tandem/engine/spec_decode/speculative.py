"""Speculative decoding: draft tokens are proposed cheaply, and the model verifies all of them in one forward pass.

Leviathan et al. (2023) and Chen et al. (2023) accept a draft token with a probability. Here the model draws every position with that
position's own random number, as it does without speculation, and a draft token is accepted where it is the token drawn. So tokens
and log-probabilities have the same bits with and without speculation, and drafts affect speed alone. A draft model
draws with the same numbers, which makes near distributions draw equal tokens.
"""

from typing import Protocol

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.kernels.api import KVLayer


class Proposer(Protocol):
    """Proposes draft tokens. ``caches``: its own keys and values, in the same blocks as the model's; none where it keeps none."""

    caches: list[KVLayer]

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Take in the tokens of a prefill, which the model computes in this step."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Returns at most ``counts[i]`` draft tokens that follow ``sequences[i]``, which have rows."""
        ...
