"""What the groups, episodes and agents of a rollout ask of an engine: Tandem's own, or another one behind the same calls."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams


class SamplingEngine(Protocol):
    """Draws the completions of requests. The calls are those of ``tandem.engine.engine.Engine``."""

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises ``UserError`` for a request that this engine cannot serve."""
        ...

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, key: int, first_index: int = 0,
        continues: Continuation | None = None,
    ) -> None:
        """Queues a request of ``params.n`` completions. ``key``: of its random numbers; ``first_index``: of its first completion in them. ``continues``: the
        tokens that its one completion has already; its output has them too, and ``max_tokens`` counts them. Raises ``UserError``; nothing is queued then."""
        ...

    def step(self) -> list[RequestOutput]:
        """Computes for a moment, and returns the outputs of the requests that are finished."""
        ...

    def listen(self, on_completion: Callable[[str, CompletionOutput], None] | None) -> None:
        """Lets ``step`` call ``on_completion`` with the request's id and each completion that finishes, before the others of its request have; ``None``: no
        longer."""
        ...

    def abort(self, request_id: str) -> bool:
        """Aborts a request; returns False if there is no such unfinished request."""
        ...

    def take_outputs(self) -> list[RequestOutput]:
        """Returns outputs that need no computation: those of aborted requests, if the engine has any."""
        ...
