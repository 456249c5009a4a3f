"""Draws groups of samples: rollout settings to engine parameters, requests to the engine, and its outputs to samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.config.repetition_detection import RepetitionDetectionParams
from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.rl.rollout.dispatch import request_key, sample_id, step_of
from tandem.rl.rollout.partial import cut_by_budget
from tandem.rl.rollout.sampling_engine import SamplingEngine
from tandem.types import FinishReason, Prompt, Sample
from tandem.types.routed_experts import extended


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Returns the engine's parameters for settings of ``tandem.rl.rollout.dispatch``."""
    names = ("n", "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "seed")
    detection = settings["repetition_detection"]
    return SamplingParams(
        **{name: settings[name] for name in names}, repetition_detection=None if detection is None else RepetitionDetectionParams(**detection)
    )


def samples_of(step: int, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> list[Sample]:
    """Returns one ``Sample`` for every completion, group by group in the order of ``prompts``; ``outputs[i]`` is the output for
    ``prompts[i]``."""
    pairs = zip(prompts, outputs, strict=True)
    return [sample_of(step, prompt, completion) for prompt, output in pairs for completion in output.outputs]


def sample_of(step: int, prompt: Prompt, completion: CompletionOutput) -> Sample:
    """Returns the sample of one completion of ``prompt``."""
    return Sample(
        id=sample_id(step, prompt.id, completion.index),
        prompt_id=prompt.id,
        index=completion.index,
        prompt_token_ids=prompt.token_ids,
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(completion.raw_logprobs),
        sampling_logprobs=tuple(completion.sampling_logprobs),
        weight_versions=tuple(completion.weight_versions),
        finish_reason=FinishReason(str(completion.finish_reason)),
        text=completion.text,
        routed_experts=completion.routed_experts,
    )


@dataclass(slots=True)
class _Group:
    """A group that is being drawn: ``waiting``, the samples that its requests continue, by request (``None``: all samples of a new group), and those that
    are ``drawn``. ``streamed``: the samples of requests that are unfinished, by request and index."""

    prompt: Prompt
    step: int
    max_tokens: int
    waiting: dict[str, Sample | None]
    drawn: list[Sample]
    streamed: dict[tuple[str, int], Sample] = field(default_factory=dict)

    def stream(self, request: str, completion: CompletionOutput) -> Sample:
        """Returns the sample of a completion of one of its requests, which is unfinished: the object that is among the ``drawn`` later."""
        sample = self.streamed[request, completion.index] = self._sample(request, completion)
        return sample

    def _sample(self, request: str, completion: CompletionOutput) -> Sample:
        begun = self.waiting[request]
        drawn = sample_of(self.step, self.prompt, completion) if begun is None else _continued(begun, completion)
        return cut_by_budget(drawn, self.max_tokens)

    def finish(self, output: RequestOutput) -> None:
        """Adds the samples of one of its requests."""
        name = output.request_id
        for completion in output.outputs:
            known = self.streamed.pop((name, completion.index), None)
            self.drawn.append(self._sample(name, completion) if known is None else known)
        del self.waiting[name]


class InFlightGroups:
    """The groups that ``engine`` draws. Further groups can be added while others are unfinished."""

    def __init__(self, engine: SamplingEngine) -> None:
        self._engine = engine
        self._groups: list[_Group] = []
        self._requests: dict[str, _Group] = {}
        self._added = 0

    def add(self, step: int, prompts: Sequence[Prompt], settings: Mapping[str, Any], unfinished: Sequence[Sample] = ()) -> None:
        """Queues a group of ``settings["n"]`` samples for each of ``prompts``, in this order; of a prompt that has ``unfinished`` samples, only those, which
        are continued. With a ``budget_tokens`` above 0 each draws at most as many tokens. Raises ``UserError`` for a prompt that the engine cannot
        serve, before any is queued."""
        params, budget = sampling_params(settings), int(settings["budget_tokens"])
        new = replace(params, max_tokens=min(settings["max_tokens"], budget)) if budget else params
        limit = lambda drawn: min(settings["max_tokens"], drawn + budget) if budget else settings["max_tokens"]
        for prompt in prompts:
            self._engine.check_request(prompt.token_ids, params)
        for prompt in prompts:
            group = _Group(prompt, step, settings["max_tokens"], {}, [])
            self._groups.append(group)
            rest = [sample for sample in unfinished if sample.prompt_id == prompt.id]
            for sample in rest:
                self._request(group, sample, step_of(sample.id), settings, replace(params, n=1, max_tokens=limit(len(sample.token_ids))))
            if not rest:
                self._request(group, None, step, settings, new)

    def _request(self, group: _Group, sample: Sample | None, step: int, settings: Mapping[str, Any], params: SamplingParams) -> None:
        name, prompt = f"request-{self._added}", group.prompt
        self._added += 1
        self._engine.add_request(
            name, prompt.token_ids, params, key=request_key(step, prompt.id, settings["purpose"]), first_index=0 if sample is None else sample.index,
            continues=None if sample is None else Continuation(sample.token_ids, sample.logprobs, sample.sampling_logprobs, sample.sampled_weight_versions),
        )  # fmt: skip
        group.waiting[name] = sample
        self._requests[name] = group

    def draw(
        self, wait: Literal["any", "all"], on_progress: Callable[[int, int], None], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample]:
        """Runs the engine until any group, or all of them, are drawn; returns their samples in the order in which the groups were added. Calls
        ``on_progress`` with the numbers of groups drawn and asked for, and ``on_samples`` with the samples that a step of
        the engine has finished, which are those that are returned later."""
        total, finished = len(self._groups), list[Sample]()
        if on_samples is not None:
            self._engine.listen(lambda name, completion: finished.append(self._requests[name].stream(name, completion)))
        while self._requests and (wait == "all" or all(group.waiting for group in self._groups)):
            outputs = self._engine.step()
            if finished and on_samples is not None:
                on_samples(finished.copy())
                finished.clear()
            for output in outputs:
                self._requests.pop(output.request_id).finish(output)
            if outputs:
                on_progress(sum(not group.waiting for group in self._groups), total)
        self._engine.listen(None)
        drawn, self._groups = [group for group in self._groups if not group.waiting], [group for group in self._groups if group.waiting]
        return [sample for group in drawn for sample in group.drawn]

    def drop(self) -> None:
        """Aborts what is unfinished."""
        for name in self._requests:
            self._engine.abort(name)
        self._engine.take_outputs()
        self._groups.clear()
        self._requests.clear()


def _continued(sample: Sample, completion: CompletionOutput) -> Sample:
    """Returns ``sample`` with the tokens of ``completion``, which begins with its own."""
    return replace(
        sample, token_ids=tuple(completion.token_ids), logprobs=tuple(completion.raw_logprobs), sampling_logprobs=tuple(completion.sampling_logprobs),
        weight_versions=tuple(completion.weight_versions), finish_reason=FinishReason(str(completion.finish_reason)), text=completion.text,
        routed_experts=extended(sample.routed_experts, completion.routed_experts),
    )  # fmt: skip
