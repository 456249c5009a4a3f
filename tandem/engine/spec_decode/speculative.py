"""Speculative decoding: draft tokens are proposed cheaply, and the model verifies all of them in one forward pass.

Leviathan et al. (2023) and Chen et al. (2023) accept a draft token with a probability. Here the model draws every position with that
position's own random number, as without speculation, and a draft token is accepted if it equals the drawn token. So tokens and
log-probabilities have the same bits with and without speculation, and drafts affect only speed. A draft model draws with the same random
numbers, so that similar distributions draw equal tokens.
"""

from typing import Protocol

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.kernels.api import CacheLayer


class Proposer(Protocol):
    """Proposes draft tokens. ``caches``: its own KV cache, in the same blocks as the model's; empty if it has none."""

    caches: list[CacheLayer]

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Reads the tokens of a prefill, which the model computes in this step."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Returns at most ``counts[i]`` draft tokens for ``sequences[i]``, which has a row."""
        ...
