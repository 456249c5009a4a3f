"""An in-flight request on the server's side: every output exactly once, from whichever engine computes it."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.serving.engines.block_events import CLIENT_REQUEST_ID
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.errors import ApiError
from tandem.types import WeightVersion


@dataclass
class _Progress:
    tokens: int = 0
    characters: int = 0


Outputs = asyncio.Queue["tuple[Stream, RequestOutput | ApiError]"]
"""Outputs of one or several streams, in order of arrival."""


@dataclass(eq=False)
class Stream:
    """``outstanding``: tokens that are still to be computed for it at most. ``attempts``: engines that it was given to.

    An engine that dies takes nothing with it: random numbers follow from the request's key, so another engine draws the
    same tokens, of which those that were handed out already are dropped here.
    """

    request: EngineRequest
    outstanding: int
    queue: "Outputs"
    started_s: float = field(default_factory=time.monotonic)
    attempts: int = 1
    engine: int = -1
    """The number of the slot whose engine has it, or had it last."""
    versions: set[WeightVersion] = field(default_factory=set)
    """The weights that drew what was handed out."""
    client_id: str = field(default_factory=CLIENT_REQUEST_ID.get)
    """The id that the client gave its request; empty if it gave none."""
    last_output_s: float = 0.0
    generated: int = 0
    """Tokens that its client got, or may get."""
    _delivered: dict[int, _Progress] = field(default_factory=lambda: defaultdict(_Progress))
    _drawn: dict[int, _Progress] = field(default_factory=lambda: defaultdict(_Progress))
    _has_prompt_scores: bool = False
    is_over: bool = False

    def take(self, output: RequestOutput) -> int:
        """Pass an engine's output on; returns the number of new tokens."""
        fresh = [new for completion in output.outputs if (new := self._fresh(completion)) is not None]
        count = sum(len(completion.token_ids) for completion in fresh)
        self.outstanding = max(0, self.outstanding - count)
        scores = None if self._has_prompt_scores else output.prompt_logprobs
        self._has_prompt_scores |= scores is not None
        if fresh or output.finished:
            self.queue.put_nowait((self, replace(output, outputs=fresh, prompt_logprobs=scores)))
        self.is_over = output.finished
        return count

    def fail(self, error: ApiError) -> None:
        """End it with an error."""
        self.is_over = True
        self.queue.put_nowait((self, error))

    def begin_again(self) -> None:
        """Another engine starts from the first token."""
        self.attempts += 1
        self._drawn.clear()

    def _fresh(self, completion: CompletionOutput) -> CompletionOutput | None:
        """What of ``completion`` was not handed out before; ``None`` where that is nothing."""
        delivered, drawn = self._delivered[completion.index], self._drawn[completion.index]
        tokens, characters = delivered.tokens - drawn.tokens, delivered.characters - drawn.characters
        drawn.tokens += len(completion.token_ids)
        drawn.characters += len(completion.text)
        if drawn.tokens <= delivered.tokens and completion.finish_reason is None:
            return None
        delivered.tokens, delivered.characters = max(delivered.tokens, drawn.tokens), max(delivered.characters, drawn.characters)
        if tokens > 0 or characters > 0:
            tokens, characters = max(tokens, 0), max(characters, 0)
            completion = replace(
                completion,
                text=completion.text[characters:],
                token_ids=completion.token_ids[tokens:],
                raw_logprobs=completion.raw_logprobs[tokens:],
                sampling_logprobs=completion.sampling_logprobs[tokens:],
                weight_versions=completion.weight_versions[tokens:],
                logprobs=None if completion.logprobs is None else completion.logprobs[tokens:],
            )
        self.versions.update(completion.weight_versions)
        return completion
