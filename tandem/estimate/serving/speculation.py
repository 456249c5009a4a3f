"""Speculative decoding in predicted steps of an engine. Imports no torch."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class Speculation:
    """In a step the model verifies ``drafts`` tokens of each sequence, each of which is accepted with the probability ``acceptance`` where those before it
    are. ``draft_bytes``: the weights that a draft reads for one token of all sequences, on one GPU; 0: drafts are looked up. ``most_sequences``: in a step with
    draft tokens. ``is_adaptive``: steps have none where they cost more than they save."""

    drafts: int
    acceptance: float
    draft_bytes: int = 0
    most_sequences: int = 64
    is_adaptive: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise UserError(f"the acceptance of draft tokens is {self.acceptance:g}; it must be from 0 to 1")

    @property
    def tokens_a_step(self) -> float:
        """The tokens that a sequence draws in a step on average (Leviathan et al., 2023, arXiv 2211.17192, equation 1): the accepted draft tokens, and the one
        that the model draws behind them."""
        return sum(self.acceptance**count for count in range(self.drafts + 1))
