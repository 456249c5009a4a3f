"""The state of an unfinished request, and the outputs that are built from it."""

from collections.abc import Sequence as Series
from dataclasses import dataclass

from tandem.engine.core.request import Request, Sequence
from tandem.engine.pooling.pooler import PooledStates
from tandem.engine.processing.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from tandem.engine.processing.stop_checker import text_of
from tandem.engine.sample.logprobs import PromptLogprobs
from tandem.text.tokenizer import Tokenizer
from tandem.types import FinishReason


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of an unfinished request. ``completions[i]``: completion i, ``None`` until it has finished. ``unfinished``: the sequences that
    have not finished. ``num_cached_tokens``: prompt tokens that the prefix cache held."""

    request: Request
    completions: list[CompletionOutput | None]
    unfinished: set[Sequence]
    times: RequestTimes
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledStates | None = None
    """What a pooling request has so far."""
    prompt_logprobs_returned: bool = False
    """Whether a stream of deltas has returned the log-probabilities of the prompt."""


def make_request_output(state: RequestState, tokenizer: Tokenizer | None, with_prompt_logprobs: bool = True) -> RequestOutput:
    """Returns the output of a request with the completions that have finished."""
    completions = [completion for completion in state.completions if completion is not None]
    request, scores = state.request, state.prompt_logprobs if with_prompt_logprobs else None
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=completions,
        num_cached_tokens=state.num_cached_tokens,
        times=state.times,
        prompt_logprobs=None if scores is None else [None if e is None else make_logprobs(e, tokenizer) for e in scores.entries],
    )


def is_hidden_stop(request: Request, token: int) -> bool:
    """Returns whether ``token`` ends the completion and is excluded from its text."""
    return token in request.stop_token_ids and not request.params.include_stop_str_in_output


def finish_reason_of(sequence: Sequence) -> tuple[FinishReason, int | str | None]:
    """Returns the finish reason of a sequence and its ``stop_reason``: the stop text, or a stop token other than an end-of-sequence token."""
    request = sequence.request
    if not sequence.token_ids:
        return FinishReason.LENGTH, None
    last = sequence.token_ids[-1]
    if sequence.stop_checker is not None and sequence.stop_checker.stopped is not None:
        return FinishReason.STOP, sequence.stop_checker.stopped
    if last in request.stop_token_ids:
        return FinishReason.STOP, None if last in request.end_token_ids else last
    if sequence.repetition is not None and sequence.repetition.is_repeating:
        return FinishReason.REPETITION, None
    return FinishReason.LENGTH, None


def make_completion_output(
    sequence: Sequence, reason: FinishReason, stop_reason: int | str | None, tokenizer: Tokenizer | None
) -> CompletionOutput:
    """Returns the completion of a finished sequence. All of its tokens must have been read back from the input batch."""
    logprobs = None
    if sequence.request.params.logprobs is not None:
        logprobs = [make_logprobs(entries, tokenizer) for entries in sequence.top_logprobs]
    return CompletionOutput(
        index=sequence.index,
        text=_text(sequence, tokenizer),
        token_ids=sequence.token_ids,
        raw_logprobs=sequence.raw_logprobs,
        sampling_logprobs=sequence.sampling_logprobs,
        weight_versions=sequence.weight_versions,
        finish_reason=str(reason),
        stop_reason=stop_reason,
        logprobs=logprobs,
    )


def _text(sequence: Sequence, tokenizer: Tokenizer | None) -> str:
    params = sequence.request.params
    if tokenizer is None or not params.detokenize:
        return ""
    if sequence.stop_checker is not None:
        return sequence.stop_checker.text()
    tokens = sequence.token_ids
    if tokens and is_hidden_stop(sequence.request, tokens[-1]):
        tokens = tokens[:-1]
    return text_of(tokenizer, tokens, params.skip_special_tokens)


def make_logprobs(entries: Series[tuple[int, float, int]], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Returns the output form of one position's entries (token id, log-probability, rank)."""

    def decoded(token: int) -> str | None:
        return None if tokenizer is None else text_of(tokenizer, [token], skip_special_tokens=False)

    return {token: Logprob(value, rank, decoded(token)) for token, value, rank in entries}
