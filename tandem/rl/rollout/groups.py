"""Draws groups of samples: rollout settings to engine parameters, requests to the engine, and its outputs to samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tandem.engine.engine import Engine
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.rl.rollout.dispatch import request_key, sample_id
from tandem.types import FinishReason, Prompt, Sample


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Returns the engine's parameters for settings of ``tandem.rl.rollout.dispatch``."""
    names = ("n", "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "seed")
    return SamplingParams(**{name: settings[name] for name in names})


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
    )


class InFlightGroups:
    """The groups that ``engine`` draws. Further groups can be added while others are unfinished."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unfinished: dict[str, tuple[int, Prompt]] = {}
        self._added = 0

    def add(self, step: int, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> None:
        """Queues a group of ``settings["n"]`` samples for each of ``prompts``, which are scheduled in this order. Raises ``UserError`` for one that the
        engine cannot serve, before any is queued."""
        params = sampling_params(settings)
        for prompt in prompts:
            self._engine.check_request(prompt.token_ids, params)
        for prompt in prompts:
            name = f"group-{self._added}"
            self._engine.add_request(name, prompt.token_ids, params, key=request_key(step, prompt.id, settings["purpose"]))
            self._unfinished[name] = (step, prompt)
            self._added += 1

    def draw(
        self, wait: Literal["any", "all"], on_progress: Callable[[int, int], None], on_samples: Callable[[Sequence[Sample]], None] | None = None
    ) -> list[Sample]:
        """Runs the engine until any group, or all of them, are finished; returns their samples in the order in which the groups were added. Calls
        ``on_progress`` with the numbers of groups finished and asked for, and ``on_samples`` with the samples that a step of
        the engine has finished."""
        total, samples, finished = len(self._unfinished), dict[str, list[Sample]](), list[Sample]()
        if on_samples is not None:
            self._engine.listen(lambda name, completion: finished.append(sample_of(*self._unfinished[name], completion)))
        while self._unfinished and (wait == "all" or not samples):
            outputs = self._engine.step()
            if finished and on_samples is not None:
                on_samples(finished.copy())
                finished.clear()
            for output in outputs:
                step, prompt = self._unfinished.pop(output.request_id)
                samples[output.request_id] = samples_of(step, [prompt], [output])
            if outputs:
                on_progress(len(samples), total)
        self._engine.listen(None)
        ordered = sorted(samples, key=lambda name: int(name.removeprefix("group-")))
        return [sample for name in ordered for sample in samples[name]]

    def drop(self) -> None:
        """Aborts what is unfinished."""
        for name in self._unfinished:
            self._engine.abort(name)
        self._engine.take_outputs()
        self._unfinished.clear()
