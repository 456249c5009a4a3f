"""Streamed requests: collects their new tokens and builds incremental outputs."""

from collections.abc import Iterable
from dataclasses import replace

from tandem.engine.core.request import Sequence
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.processing.answers import Answer, logprobs_of, output_of
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.engine.sample.sampling_params import RequestOutputKind
from tandem.text.tokenizer import Tokenizer
from tandem.types import WeightVersion


class Streams:
    """Collects the completions with new tokens between two calls of ``take``."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._news: dict[str, tuple[Answer, list[CompletionOutput]]] = {}

    def ended(self, answer: Answer, completion: CompletionOutput, sequence: Sequence) -> None:
        """Adds a completion that has finished."""
        news = completion
        if _is_delta(sequence):
            news = _rest(completion, sequence)
        self._note(answer, news)

    def running(self, answers: dict[str, Answer], batch: InputBatch, version: WeightVersion) -> None:
        """Adds what the streamed rows of ``batch`` have drawn, with the weights ``version`` unless it was read back."""
        sequences = list(batch.streamed.values())
        if not sequences:
            return
        first = [sequence.streamed_tokens if _is_delta(sequence) else 0 for sequence in sequences]
        for sequence, at, drawn in zip(sequences, first, batch.drawn_since(sequences, first), strict=True):
            known = at + len(drawn[0])
            if known > sequence.streamed_tokens:
                completion = self._completion(sequence, at, drawn, version)
                sequence.streamed_tokens = known
                self._note(answers[sequence.request.id], completion)

    def take(self) -> list[RequestOutput]:
        """Removes and returns an output for every request with new tokens."""
        outputs = [self._output(answer, completions) for answer, completions in self._news.values()]
        self._news.clear()
        return outputs

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def _note(self, answer: Answer, completion: CompletionOutput) -> None:
        self._news.setdefault(answer.request.id, (answer, []))[1].append(completion)

    def _output(self, answer: Answer, completions: Iterable[CompletionOutput]) -> RequestOutput:
        finished = not answer.open
        if finished and answer.request.params.output_kind is RequestOutputKind.CUMULATIVE:
            return output_of(answer, self._tokenizer)
        with_prompt = not answer.prompt_was_shown
        answer.prompt_was_shown = answer.request.params.output_kind is RequestOutputKind.DELTA
        return replace(
            output_of(answer, self._tokenizer, with_prompt_logprobs=with_prompt),
            outputs=sorted(completions, key=lambda completion: completion.index), finished=finished,
        )

    def _completion(
        self, sequence: Sequence, at: int, drawn: tuple[list[int], list[float], list[float]], version: WeightVersion
    ) -> CompletionOutput:
        tokens, raw, sampling = drawn
        versions = sequence.weight_versions[at:]
        text = ""
        if sequence.stop_checker is not None:
            text = sequence.stop_checker.shown()
            shown, sequence.streamed_characters = sequence.streamed_characters, len(text)
            text = text[shown:] if _is_delta(sequence) else text
        logprobs = None
        if sequence.request.params.logprobs is not None:
            logprobs = [logprobs_of(entries, self._tokenizer) for entries in sequence.top_logprobs[at : at + len(tokens)]]
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=tokens,
            raw_logprobs=raw,
            sampling_logprobs=sampling,
            weight_versions=versions + [version] * (len(tokens) - len(versions)),
            finish_reason=None,
            logprobs=logprobs,
        )


def _is_delta(sequence: Sequence) -> bool:
    return sequence.request.params.output_kind is RequestOutputKind.DELTA


def _rest(completion: CompletionOutput, sequence: Sequence) -> CompletionOutput:
    """Returns the part of a finished completion that was not returned yet."""
    at = sequence.streamed_tokens
    return replace(
        completion,
        text=completion.text[sequence.streamed_characters :],
        token_ids=completion.token_ids[at:],
        raw_logprobs=completion.raw_logprobs[at:],
        sampling_logprobs=completion.sampling_logprobs[at:],
        weight_versions=completion.weight_versions[at:],
        logprobs=None if completion.logprobs is None else completion.logprobs[at:],
    )
