"""How a completion is drawn, with vLLM's names, meanings and defaults."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.types import UserError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

_NOT_SUPPORTED = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
    "bad_words": None,
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request. Every value is checked here; ``UserError`` names the one that is wrong.

    ``n``: completions of the prompt. ``temperature``: 0 is greedy. ``top_k``: 0 or -1 is off. ``top_p``: 1 is off.
    ``min_p``: 0 is off. ``seed``: ``None`` takes the engine's. ``stop``: texts that end a completion; the text is cut
    before the one found, or after it with ``include_stop_str_in_output``. ``stop_token_ids``: tokens that end a
    completion besides the tokenizer's end tokens, which ``ignore_eos`` turns off. ``min_tokens``: end tokens cannot be
    drawn and stop texts do not count before this many. ``max_tokens``: ``None`` goes on to the end of the context.
    ``logprobs``: as many of the most likely tokens' raw log-probabilities are returned for each position.
    ``logit_bias``: added to the logits of the token ids it names, cut to -100 .. 100 as OpenAI does.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, neutral in _NOT_SUPPORTED.items():
            if getattr(self, name) != neutral and getattr(self, name) != []:
                raise UserError(f"sampling {name} is {getattr(self, name)}; it is not supported, leave it at {neutral}")
        self._check_integers()
        self._check_numbers()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(not isinstance(text, str) or not text for text in stop):
            raise UserError(f"sampling stop is {list(stop)}; every entry must be a text of at least one character")
        if stop and not self.detokenize:
            raise UserError("sampling stop needs detokenize=True; stop_token_ids work without it")
        given = self.logit_bias or {}
        bias = {int(token): min(100.0, max(-100.0, float(value))) for token, value in given.items()}
        if any(math.isnan(value) for value in given.values()):
            raise UserError(f"sampling logit_bias is {dict(given)}; every bias must be a number")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", bias or None)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.is_greedy:
            object.__setattr__(self, "temperature", 0.0)

    def _check_integers(self) -> None:
        lowest: dict[str, int] = {"n": 1, "top_k": -1, "max_tokens": 1, "min_tokens": 0, "logprobs": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UserError(f"sampling {name} is {value!r}; it must be a whole number of at least {low}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise UserError(f"sampling seed is {self.seed!r}; it must be a whole number or None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"sampling min_tokens is {self.min_tokens}; it must be at most max_tokens ({self.max_tokens})"
            )
        for token in self.stop_token_ids or ():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(f"sampling stop_token_ids holds {token!r}; every entry must be a token id")

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"sampling temperature is {self.temperature}; it must be at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling top_p is {self.top_p}; it must be above 0 and at most 1 (1 turns it off)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"sampling min_p is {self.min_p}; it must be from 0 to 1 (0 turns it off)")
        if self.n > 1 and self.is_greedy:
            raise UserError(f"sampling n is {self.n} at temperature 0; greedy completions are equal, so n must be 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``UserError`` where a token id that the settings name does not exist."""
        for name, tokens in (("stop_token_ids", self.stop_token_ids or ()), ("logit_bias", self.logit_bias or {})):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise UserError(
                        f"sampling {name} names token {token}; the vocabulary has the ids 0 to {vocab_size - 1}"
                    )
