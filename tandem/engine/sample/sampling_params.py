"""``SamplingParams``: the settings of a request, with vLLM's names, meanings and defaults."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real

from tandem.config.arguments import explained
from tandem.config.repetition_detection import RepetitionDetectionParams
from tandem.config.vllm_names import SAMPLING
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.types import UserError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

_LOWEST = {"n": 1, "top_k": -1, "max_tokens": 0, "min_tokens": 0, "logprobs": -1, "prompt_logprobs": -1, "truncate_prompt_tokens": -1}
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")


class RequestOutputKind(Enum):
    """What a step returns of a request, with vLLM's names. ``FINAL_ONLY``: the whole output at its end. ``DELTA``: the tokens since the last
    output. ``CUMULATIVE``: all tokens so far."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@explained(SAMPLING)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request. Every value is checked here; ``UserError`` names the one that is wrong.

    ``n``: completions of the prompt. ``temperature``: 0 is greedy. ``top_k``: 0 or -1 is off. ``top_p``: 1 is off.
    ``min_p``: 0 is off. ``seed``: ``None`` uses the engine's. ``stop``: texts that end a completion; its text is cut
    before the stop text, or after it with ``include_stop_str_in_output``. ``stop_token_ids``: tokens that end a
    completion in addition to the tokenizer's end tokens, which ``ignore_eos`` turns off. ``min_tokens``: number of tokens
    before which end tokens cannot be drawn and stop texts are ignored. ``max_tokens``: ``None`` continues to the end of the
    context; 0 scores the prompt and draws nothing (with ``prompt_logprobs``).
    ``logprobs``: number of most likely tokens whose raw log-probabilities are returned for each position; -1: all.
    ``prompt_logprobs``: the same for the prompt's tokens, all of which are computed, without the prefix cache.

    The logits are changed in this order: ``logit_bias`` is added to the token ids it names, clamped to -100 .. 100 as
    OpenAI does. ``repetition_penalty`` divides (above 0) or multiplies (below) the logits of tokens that occur in the
    prompt or the completion (Keskar et al., 2019); 1 is off. ``frequency_penalty`` is subtracted once per occurrence of a
    token in the completion, ``presence_penalty`` once if it occurs (OpenAI's; -2 .. 2; the prompt does not count).
    ``structured_outputs`` and ``allowed_token_ids`` leave only the tokens they permit; ``bad_words`` forbids the last token
    of each such text after its other tokens, unless no other token is left.

    ``truncate_prompt_tokens``: number of the prompt's last tokens that are used; -1: as many as leave room for
    ``max_tokens``. ``best_of`` is not supported: ask for ``n`` and choose by ``cumulative_logprob``.

    ``repetition_detection``: ends a completion that repeats itself, with the finish reason ``repetition``.

    ``output_kind``: what a step returns of the request; ``None`` is ``FINAL_ONLY`` for ``LLM`` and ``CUMULATIVE`` for ``AsyncLLM``.
    """

    n: int = 1
    best_of: int | None = None
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
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    def __post_init__(self) -> None:
        if self.best_of is not None:
            raise UserError(f"sampling best_of is {self.best_of}; it is not supported: ask for n and choose among them")
        self._check_integers()
        try:
            self._check_numbers()
        except TypeError:
            name = next(name for name in _NUMBERS if not isinstance(getattr(self, name), Real))
            raise UserError(f"sampling {name} is {getattr(self, name)!r}; it must be a number") from None
        stop, bad_words = _texts("stop", self.stop), _texts("bad_words", self.bad_words)
        if stop and not self.detokenize:
            raise UserError("sampling stop needs detokenize=True; stop_token_ids work without it")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise UserError(f"sampling structured_outputs is {self.structured_outputs!r}; give a StructuredOutputsParams")
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise UserError(f"sampling repetition_detection is {self.repetition_detection!r}; give a RepetitionDetectionParams")
        if self.repetition_detection is not None:
            self.repetition_detection.check()
        given = self.logit_bias or {}
        if given and not isinstance(given, Mapping):
            raise UserError(f"sampling logit_bias is {given!r}; it must be a mapping of token ids to numbers")
        bias = {int(token): min(100.0, max(-100.0, float(value))) for token, value in given.items()}
        if any(math.isnan(value) for value in given.values()):
            raise UserError(f"sampling logit_bias is {dict(given)}; every bias must be a number")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(self.allowed_token_ids))))
        object.__setattr__(self, "logit_bias", bias or None)
        # More than any vocabulary has is as many as it has.
        object.__setattr__(self, "top_k", min(max(self.top_k, 0), 2**31 - 1))
        if self.is_greedy:
            object.__setattr__(self, "temperature", 0.0)

    def _check_integers(self) -> None:
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UserError(f"sampling {name} is {value!r}; it must be a whole number of at least {low}")
            if value >= 2**63:
                raise UserError(f"sampling {name} is a whole number of {value.bit_length()} bits; it must be below 2^63")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise UserError(f"sampling seed is {self.seed!r}; it must be a whole number or None")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise UserError("sampling max_tokens is 0; it must be at least 1, or prompt_logprobs must ask for scores")
        if self.truncate_prompt_tokens == 0:
            raise UserError("sampling truncate_prompt_tokens is 0; it must be at least 1, or -1 for what fits")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"sampling min_tokens is {self.min_tokens}; it must be at most max_tokens ({self.max_tokens})"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            tokens = getattr(self, name)
            if tokens is not None and not isinstance(tokens, Iterable):
                raise UserError(f"sampling {name} is {tokens!r}; it must be a list of token ids")
            for token in tokens or ():
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise UserError(f"sampling {name} holds {token!r}; every entry must be a token id")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise UserError("sampling allowed_token_ids is empty; name at least one token, or leave it at None")

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"sampling temperature is {self.temperature}; it must be at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling top_p is {self.top_p}; it must be above 0 and at most 1 (1 turns it off)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"sampling min_p is {self.min_p}; it must be from 0 to 1 (0 turns it off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UserError(f"sampling {name} is {getattr(self, name)}; it must be from -2 to 2 (0 turns it off)")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"sampling repetition_penalty is {self.repetition_penalty}; it must be above 0 and finite (1 turns it off)"
            )
        if self.n > 1 and self.is_greedy:
            raise UserError(f"sampling n is {self.n} at temperature 0; greedy completions are equal, so n must be 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_streamed(self) -> bool:
        return self.output_kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` as a tuple, also if it was given as one text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ``UserError`` for a token id outside the vocabulary."""
        if not (self.stop_token_ids or self.allowed_token_ids or self.logit_bias):
            return
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise UserError(
                        f"sampling {name} names token {token}; the vocabulary has the ids 0 to {vocab_size - 1}"
                    )


def _texts(name: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns one text or several as a tuple. Raises ``UserError`` for an entry that is empty or not a text."""
    if given is None:
        return ()
    if not isinstance(given, Iterable):
        raise UserError(f"sampling {name} is {given!r}; it must be a text or a list of texts")
    texts = (given,) if isinstance(given, str) else tuple(given)
    if any(not isinstance(text, str) or not text for text in texts):
        raise UserError(f"sampling {name} is {list(texts)}; every entry must be a text of at least one character")
    return texts
