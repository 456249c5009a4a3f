"""Builds the batch of one step from scored samples: groups, advantages and loss masks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.rl.algorithms.dr_grpo import dr_grpo_advantages
from tandem.rl.algorithms.groups import usable
from tandem.rl.algorithms.grpo import grpo_advantages
from tandem.rl.algorithms.rloo import rloo_advantages
from tandem.types import Batch, FinishReason, Sample, Score, TrainSequence


def group_advantages(config: AlgorithmConfig, rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns the advantages [P, G] of ``config.name``."""
    if config.name == "grpo":
        return grpo_advantages(rewards, valid, config.advantage_epsilon)
    return dr_grpo_advantages(rewards, valid) if config.name == "dr_grpo" else rloo_advantages(rewards, valid)


def make_batch(
    step: int,
    samples: Sequence[Sample],
    scores: Sequence[Score],
    config: AlgorithmConfig,
    max_tokens: int,
    reference_logprobs: Mapping[str, Sequence[float]] | None = None,
) -> Batch:
    """Returns the batch of optimizer step ``step``; ``scores`` are matched to ``samples`` by id.

    A group is all samples of one prompt. A sample without a reward (infrastructure fault, or aborted) is left out of its group's statistics
    and has a loss mask of zeros; so has every sample of a group with fewer than two rewards and, with ``config.mask_truncated``, one
    truncated at the token limit (which still counts in the statistics). ``reference_logprobs``: by sample id, one entry per token of prompt
    and completion. ``max_tokens``: the maximum length of a completion, Dr. GRPO's constant unless ``config.length_constant`` is set."""
    score_of = {score.sample_id: score for score in scores}
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_id, []).append(index)
    widest = max((len(members) for members in groups.values()), default=0)
    rewards = torch.zeros(len(groups), widest, dtype=torch.float64)
    valid = torch.zeros(len(groups), widest, dtype=torch.bool)
    for row, members in enumerate(groups.values()):
        for column, index in enumerate(members):
            value = score_of[samples[index].id].value
            if value is not None and samples[index].finish_reason is not FinishReason.ABORT:
                rewards[row, column], valid[row, column] = value, True
    advantages, counted = group_advantages(config, rewards, valid).tolist(), usable(valid).tolist()
    place = {
        index: (row, column) for row, members in enumerate(groups.values()) for column, index in enumerate(members)
    }
    sequences = []
    for index, sample in enumerate(samples):
        row, column = place[index]
        truncated = config.mask_truncated and sample.finish_reason is FinishReason.LENGTH
        sequences.append(
            train_sequence(
                sample,
                advantage=advantages[row][column],
                counts=counted[row][column] and not truncated,
                reference_logprobs=None if reference_logprobs is None else reference_logprobs[sample.id],
            )
        )
    return Batch(step, tuple(sequences), config.length_constant or max_tokens)


def train_sequence(
    sample: Sample, advantage: float = 0.0, counts: bool = True, reference_logprobs: Sequence[float] | None = None
) -> TrainSequence:
    """Returns ``sample`` as a training sequence: every token that the model sampled has ``advantage``; ``counts``: these tokens are in the loss
    mask."""
    prompt = len(sample.prompt_token_ids)
    before = (0.0,) * prompt
    return TrainSequence(
        id=sample.id,
        token_ids=sample.prompt_token_ids + sample.token_ids,
        prompt_length=prompt,
        loss_mask=before + tuple(float(counts and is_sampled) for is_sampled in sample.is_sampled),
        advantages=before + tuple(advantage if is_sampled else 0.0 for is_sampled in sample.is_sampled),
        rollout_logprobs=before + sample.logprobs,
        sampling_logprobs=before + sample.sampling_logprobs,
        reference_logprobs=None if reference_logprobs is None else tuple(reference_logprobs),
        weight_step=max((version.step for version in sample.sampled_weight_versions), default=-1),
        response_mask=(False,) * prompt + sample.response_mask if sample.response_mask else (),
    )
