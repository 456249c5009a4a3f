"""Speculative decoding: tokens are guessed cheaply, and the model looks at all of them in one forward pass.

Leviathan et al. (2023) and Chen et al. (2023) accept a guess with a probability. Here the model draws every position with that
position's own random number, as it does without speculation, and a guess is accepted where it is the token drawn. So tokens
and log-probabilities have the same bits with and without speculation, and a guess decides about speed alone. A draft model
draws with the same numbers, which makes near distributions draw equal tokens.
"""

from dataclasses import dataclass
from typing import Protocol

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Chunk
from tandem.kernels.api import KVLayer


class Proposer(Protocol):
    """Guesses tokens. ``caches``: its own keys and values, in the same blocks as the model's; none where it keeps none."""

    caches: list[KVLayer]

    def read(self, chunks: tuple[Chunk, ...]) -> None:
        """Take in the tokens of a prefill, which the model computes in this step."""
        ...

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """At most ``counts[i]`` guesses of what follows ``sequences[i]``, which have rows."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What came of it since the engine started: ``proposals`` (one a sequence and step), the tokens that were ``proposed`` and those
    that were ``accepted``. Each proposal also yields the model's own token, accepted or not."""

    proposals: int = 0
    proposed: int = 0
    accepted: int = 0
