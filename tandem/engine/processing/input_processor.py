"""Validates what a caller asks for and builds the request and the sequences that the scheduler queues."""

from collections.abc import Sequence as Series
from typing import NamedTuple

from tandem.config.engine import SpeculativeConfig
from tandem.engine.core.request import Request, Sequence, random_key
from tandem.engine.pooling.params import PoolingParams
from tandem.engine.processing.outputs import Continuation
from tandem.engine.processing.prompt_check import check_prompt
from tandem.engine.processing.repetition import RepetitionDetector
from tandem.engine.processing.stop_checker import StopChecker
from tandem.engine.processing.truncation import truncate_prompt
from tandem.engine.sample.logits_processors import LogitsProcessors, make_logits_processors
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings, check_completions
from tandem.engine.spec_decode.draft_length import DraftLength
from tandem.engine.structured_output.manager import StructuredOutputManager
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


class _Endings(NamedTuple):
    """What ends the completions of the requests with ``params``: ``stop_token_ids`` as in ``Request``, and all tokens that may end one."""

    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    end_tokens: frozenset[int]


class InputProcessor:
    """Builds requests for a model of ``vocab_size`` tokens. ``speculative``: how draft tokens are proposed; ``None``: not at all."""

    def __init__(
        self, settings: EngineSettings, tokenizer: Tokenizer | None, vocab_size: int, speculative: SpeculativeConfig | None
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._speculative = speculative
        self._structured_outputs = StructuredOutputManager(tokenizer, vocab_size)
        self._end_tokens = frozenset(tokenizer.eos_token_ids if tokenizer is not None else ())
        self._arrivals = 0
        self._endings: _Endings | None = None
        """Of the parameters that were checked last: those of one call are usually the same for all of its prompts."""

    def request(
        self, request_id: str, prompt_token_ids: Series[int], params: SamplingParams, *, prompt: str | None = None, key: int | None = None,
        first_index: int = 0, priority: int = 0, cache_salt: str = "", adapter: str = "", num_draft_tokens: int | None = None,
        pooling: PoolingParams | None = None, reads_all_states: bool = False,
    ) -> Request:
        """Returns the request for the arguments of ``Engine.add_request``. ``pooling``: what it pools instead of drawing tokens; ``reads_all_states``: as in
        ``Request``. Raises ``UserError`` if the engine cannot serve it."""
        tokens = self._truncated(prompt_token_ids, params)
        processors = self._check(tokens, params, draws=pooling is None)
        longest = self._settings.max_model_len
        return Request(
            id=request_id,
            prompt=prompt,
            prompt_token_ids=list(tokens),
            params=params,
            seed=self._settings.seed if params.seed is None else params.seed,
            key=self._arrivals if key is None else key,
            arrival=self._arrivals,
            stop_token_ids=self._endings_of(params).stop_token_ids,
            end_token_ids=self._end_tokens,
            priority=priority,
            first_index=first_index,
            cache_salt=cache_salt,
            adapter=adapter,
            max_length=longest if params.max_tokens is None else min(len(tokens) + params.max_tokens, longest),
            logits_processors=processors,
            draft_tokens=0 if pooling is not None else self._draft_tokens(num_draft_tokens),
            pooling=pooling,
            reads_all_states=reads_all_states,
        )

    def start(self, request: Request, continues: Continuation | None = None) -> list[Sequence]:
        """Accepts a request and returns its sequences, one for each completion; one that ``continues`` has the tokens drawn before."""
        self._arrivals += 1
        params, processors = request.params, request.logits_processors
        keys = [random_key(request.seed, request.key, request.first_index + i) for i in range(params.n)]
        sequences = [
            Sequence(request, i, key, stop_checker=self._stop_checker(params), cursor=processors.cursor() if processors is not None else None)
            for i, key in enumerate(keys)
        ]
        if params.repetition_detection is not None:
            for sequence in sequences:
                sequence.repetition = RepetitionDetector(params.repetition_detection)
        if request.draft_tokens and self._speculative is not None:
            for sequence in sequences:
                # A match bounds the drafts of method 'suffix'.
                adapts_length = self._speculative.method != "suffix"
                sequence.draft = DraftLength(request.draft_tokens, self._speculative.worth, self._speculative.adaptive, adapts_length)
        if continues is not None:
            _continue(sequences[0], continues)
        return sequences

    def check_continuation(self, request: Request, continues: Continuation) -> None:
        """Raises ``UserError`` if ``request`` cannot go on after the tokens drawn before."""
        drawn, params = len(continues.token_ids), request.params
        if params.n != 1:
            raise UserError(f"sampling n is {params.n}; a completion is continued by a request of its own, with n 1")
        if request.logits_processors is not None or params.logprobs is not None or params.prompt_logprobs is not None:
            raise UserError("a request that changes logits or returns log-probabilities of further tokens cannot be continued")
        if (params.max_tokens is not None and params.max_tokens <= drawn) or len(request.prompt_token_ids) + drawn >= request.max_length:
            raise UserError(f"the completion has {drawn} tokens already, and the request ends at max_tokens ({params.max_tokens}); raise it")

    def check(self, prompt_token_ids: Series[int], params: SamplingParams, draws: bool = True) -> None:
        """Raises ``UserError`` for a request that the engine cannot serve. ``draws``: it asks for tokens."""
        self._check(self._truncated(prompt_token_ids, params), params, draws)

    def _check(self, prompt_token_ids: Series[int], params: SamplingParams, draws: bool) -> LogitsProcessors | None:
        """As ``check``, for a truncated prompt; returns the logits processors of the request."""
        vocab = self._vocab_size
        check_prompt(prompt_token_ids, self._settings.max_model_len, vocab, max_tokens=params.max_tokens, draws=draws)
        params.check_vocabulary(vocab)
        if params.n > self._settings.max_num_seqs:
            check_completions(params.n)
        if params.stop and self._tokenizer is None:
            raise UserError("sampling stop needs a tokenizer and this engine has none; use stop_token_ids")
        end_tokens = self._endings_of(params).end_tokens
        return make_logits_processors(params, prompt_token_ids, end_tokens, vocab, self._tokenizer, self._structured_outputs)

    def _endings_of(self, params: SamplingParams) -> _Endings:
        if self._endings is None or self._endings.params is not params:
            given = frozenset(params.stop_token_ids or ())
            stops = given if params.ignore_eos else given | self._end_tokens
            self._endings = _Endings(params, tuple(sorted(stops)), self._end_tokens | given)
        return self._endings

    def _truncated(self, prompt_token_ids: Series[int], params: SamplingParams) -> Series[int]:
        return truncate_prompt(prompt_token_ids, params.truncate_prompt_tokens, params.max_tokens, self._settings.max_model_len)

    def _draft_tokens(self, asked: int | None) -> int:
        """Returns the maximum number of draft tokens in one step for a request that asks for ``asked`` of them."""
        most = 0 if self._speculative is None else self._speculative.draft_tokens
        if asked is not None and not 0 <= asked <= most:
            raise UserError(
                f"num_draft_tokens is {asked}; this engine proposes at most {most} tokens a step, give 0 to {most}"
                + ("" if most else ", or start it with speculative settings")
            )
        return most if asked is None else asked

    def _stop_checker(self, params: SamplingParams) -> StopChecker | None:
        watched = (params.stop or params.is_streamed) and params.max_tokens != 0 and params.detokenize
        return StopChecker(self._tokenizer, params) if watched and self._tokenizer is not None else None


def _continue(sequence: Sequence, continues: Continuation) -> None:
    sequence.token_ids += continues.token_ids
    sequence.raw_logprobs += continues.raw_logprobs
    sequence.sampling_logprobs += continues.sampling_logprobs
    sequence.weight_versions += continues.weight_versions
    for token in continues.token_ids:
        if sequence.stop_checker is not None:
            sequence.stop_checker.push(token)
        if sequence.repetition is not None:
            sequence.repetition.push(token)
