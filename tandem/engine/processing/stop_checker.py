"""Detokenizes a completion incrementally, for stop texts and streams."""

from collections.abc import Sequence

from tandem.engine.sample.sampling_params import SamplingParams
from tandem.text.detokenize import IncrementalDetokenizer
from tandem.text.stop import StopMatcher
from tandem.text.tokenizer import Tokenizer


class StopChecker:
    """Checks one completion for stop texts. ``stopped``: the stop text that ended it, ``None`` while it runs.

    A stop text ends the completion if it ends after ``min_tokens``; as in vLLM, it may begin before.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_texts, params.include_stop_str_in_output)
        self._unwatched = params.min_tokens
        self._pieces: list[str] = []

    @property
    def stopped(self) -> str | None:
        return self._matcher.stopped

    def push(self, token: int) -> str | None:
        """Appends a token; returns ``stopped``."""
        piece = self._detokenizer.push(token) if token < self._tokenizer.vocab_size else ""
        self._unwatched -= 1
        self._pieces.append(self._matcher.push(piece, may_stop=self._unwatched < 0))
        return self.stopped

    def shown(self) -> str:
        """Returns the text that no later token can change: without a partial character or the beginning of a stop text."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def text(self) -> str:
        """Returns the whole text, cut at the stop text if there is one. No token may follow."""
        if self.stopped is None:
            self._pieces += [self._matcher.push(self._detokenizer.finish(), may_stop=False)]
            self._pieces += [self._matcher.finish()]
        return "".join(self._pieces)


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Returns the text of ``token_ids``. Ids beyond the tokenizer's vocabulary, which a model may have, have no text."""
    size = tokenizer.vocab_size
    known = token_ids if max(token_ids, default=0) < size else [token for token in token_ids if token < size]
    return tokenizer.decode(known, skip_special_tokens)
