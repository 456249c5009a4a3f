"""What the heads of a model give for the hidden states of tokens."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tandem.kernels.api import TokenLogprobs


class DraftStep(NamedTuple):
    """What a draft head gives for the R tokens at one position of its drafts. ``cross_entropy[R]``: to the target's distribution over the head's vocabulary,
    in nats. ``agrees[R]``: 1.0 where its most probable token is the target's. ``mask[R]``: of the tokens in the loss, ``known[R]``: 1.0 where the target's
    most probable token is in the head's vocabulary."""

    cross_entropy: Tensor
    agrees: Tensor
    mask: Tensor
    known: Tensor


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """``of_language``: the log-probabilities of the next tokens, by a language-model head. ``of_value[R]``: the numbers of a value head.
    ``of_draft``: of a draft head, one for each position of a draft. ``None``: the model has no such head."""

    of_language: TokenLogprobs | None = None
    of_value: Tensor | None = None
    of_draft: tuple[DraftStep, ...] | None = None

    @property
    def logprobs(self) -> TokenLogprobs:
        assert self.of_language is not None, "the model has no language-model head"
        return self.of_language

    @property
    def values(self) -> Tensor:
        assert self.of_value is not None, "the model has no value head"
        return self.of_value
