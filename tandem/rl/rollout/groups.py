"""Converts rollout settings to engine parameters, and engine outputs to groups of samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.rl.rollout.dispatch import sample_id
from tandem.types import FinishReason, Prompt, Sample


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Returns the engine's parameters for settings of ``tandem.rl.rollout.dispatch``."""
    names = ("n", "temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "seed")
    return SamplingParams(**{name: settings[name] for name in names})


def samples_of(step: int, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> list[Sample]:
    """Returns one ``Sample`` for every completion, group by group in the order of ``prompts``; ``outputs[i]`` is the output for
    ``prompts[i]``."""
    samples = []
    for prompt, output in zip(prompts, outputs, strict=True):
        for index, completion in enumerate(output.outputs):
            samples.append(
                Sample(
                    id=sample_id(step, prompt.id, index),
                    prompt_id=prompt.id,
                    index=index,
                    prompt_token_ids=prompt.token_ids,
                    token_ids=tuple(completion.token_ids),
                    logprobs=tuple(completion.raw_logprobs),
                    sampling_logprobs=tuple(completion.sampling_logprobs),
                    weight_versions=tuple(completion.weight_versions),
                    finish_reason=FinishReason(str(completion.finish_reason)),
                    text=completion.text,
                )
            )
    return samples
