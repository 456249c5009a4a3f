"""What the heads of a model give for the hidden states of tokens."""

from dataclasses import dataclass

from torch import Tensor

from tandem.kernels.api import TokenLogprobs


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """``of_language``: the log-probabilities of the next tokens, by a language-model head. ``of_value[R]``: the numbers of a value head. ``None``: the model
    has no such head."""

    of_language: TokenLogprobs | None = None
    of_value: Tensor | None = None

    @property
    def logprobs(self) -> TokenLogprobs:
        assert self.of_language is not None, "the model has no language-model head"
        return self.of_language

    @property
    def values(self) -> Tensor:
        assert self.of_value is not None, "the model has no value head"
        return self.of_value
