"""Streamed requests: collects their new tokens and builds incremental outputs."""

from collections.abc import Iterable
from dataclasses import replace

from tandem.engine.core.request import Sequence
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.engine.processing.request_state import RequestState, make_logprobs, make_request_output
from tandem.engine.sample.sampling_params import RequestOutputKind
from tandem.text.tokenizer import Tokenizer
from tandem.types import WeightVersion


class Streams:
    """Collects the completions that have new tokens since the last call of ``take_outputs``."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pending: dict[str, tuple[RequestState, list[CompletionOutput]]] = {}

    def add_finished(self, state: RequestState, completion: CompletionOutput, sequence: Sequence) -> None:
        """Adds a completion that has finished."""
        self._add(state, _rest(completion, sequence) if _is_delta(sequence) else completion)

    def add_running(self, request_states: dict[str, RequestState], batch: InputBatch, version: WeightVersion) -> None:
        """Adds the new tokens of the streamed rows of ``batch``. Those that were not read back yet were drawn with the weights ``version``."""
        sequences = list(batch.streamed.values())
        if not sequences:
            return
        first = [sequence.streamed_tokens if _is_delta(sequence) else 0 for sequence in sequences]
        for sequence, at, drawn in zip(sequences, first, batch.drawn_since(sequences, first), strict=True):
            known = at + len(drawn[0])
            if known > sequence.streamed_tokens:
                completion = self._completion(sequence, at, drawn, version)
                sequence.streamed_tokens = known
                self._add(request_states[sequence.request.id], completion)

    def take_outputs(self) -> list[RequestOutput]:
        """Returns an output for every request with new tokens, and forgets them."""
        outputs = [self._output(state, completions) for state, completions in self._pending.values()]
        self._pending.clear()
        return outputs

    @property
    def has_outputs(self) -> bool:
        return bool(self._pending)

    def _add(self, state: RequestState, completion: CompletionOutput) -> None:
        self._pending.setdefault(state.request.id, (state, []))[1].append(completion)

    def _output(self, state: RequestState, completions: Iterable[CompletionOutput]) -> RequestOutput:
        finished = not state.unfinished
        if finished and state.request.params.output_kind is RequestOutputKind.CUMULATIVE:
            return make_request_output(state, self._tokenizer)
        with_prompt = not state.prompt_logprobs_returned
        state.prompt_logprobs_returned = state.request.params.output_kind is RequestOutputKind.DELTA
        return replace(
            make_request_output(state, self._tokenizer, with_prompt_logprobs=with_prompt),
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
            logprobs = [make_logprobs(entries, self._tokenizer) for entries in sequence.top_logprobs[at : at + len(tokens)]]
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
