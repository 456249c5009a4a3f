"""The outputs of the engine, with vLLM's field names."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.pooling.outputs import PooledData
from tandem.types import RoutedExperts, WeightVersion


@dataclass(slots=True, eq=False)
class PreemptionTime:
    """A preemption of sequence ``index`` of a request, by ``how`` (a transition): from ``at_s`` until it was scheduled again, ``again_s`` (0: not yet), in
    seconds of the monotonic clock."""

    index: int
    how: str
    at_s: float
    again_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's raw log-probability in nats and its ``rank`` (1 is the most likely). ``decoded_token`` is ``None``
    without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion. ``token_ids``, ``raw_logprobs``, ``sampling_logprobs`` and ``weight_versions`` have one entry per token, including the
    end token if one was drawn.

    ``raw_logprobs``: at temperature 1, without filters and biases. ``sampling_logprobs``: in the distribution that the token was drawn from
    (0.0 if greedy). ``finish_reason``: ``stop``, ``length``, ``repetition`` or ``abort``; ``None`` while it is unfinished. ``stop_reason``: the stop text or
    the stop token id that ended it; ``None`` for an end-of-sequence token. ``logprobs``: for each position the requested number of most likely
    tokens and the drawn one, or ``None`` if not requested. ``routed_experts``: of the prompt and the completion, where another engine than Tandem's
    records them."""

    index: int
    text: str
    token_ids: list[int]
    raw_logprobs: list[float]
    sampling_logprobs: list[float]
    weight_versions: list[WeightVersion]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    routed_experts: RoutedExperts | None = None

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.raw_logprobs)


@dataclass(frozen=True, slots=True)
class Continuation:
    """The beginning of a completion that an earlier request has drawn: the fields of ``CompletionOutput``, with one entry per token."""

    token_ids: Sequence[int]
    raw_logprobs: Sequence[float]
    sampling_logprobs: Sequence[float]
    weight_versions: Sequence[WeightVersion]


@dataclass(slots=True)
class RequestTimes:
    """When a request was added, first scheduled, and drew its first token: seconds of the system's monotonic clock, 0 if not yet. ``preemptions``: of its
    sequences, which other processes are not told of."""

    arrival_s: float
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    preemptions: Sequence[PreemptionTime] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one request: ``outputs[i]`` is completion i of its group. ``prompt`` is ``None`` if token ids were given.
    ``num_cached_tokens``: prompt tokens that the prefix cache held when the request was first admitted. ``prompt_logprobs``: for each prompt
    token except the first (``None``) the requested number of most likely tokens and the prompt's own, with the weights that first computed
    it; ``None`` if not requested. ``pooled``: what a pooling request asked for, whose one completion has no tokens; ``None`` for others, and if it was
    aborted.

    A streamed request (``SamplingParams.output_kind``) has several outputs, the last of which is ``finished``. Each lists the completions with
    new tokens; with deltas only the first has ``prompt_logprobs``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    times: RequestTimes | None = field(default=None, compare=False)
    pooled: PooledData | None = None
