"""From judged samples to the sequences that one step trains on."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.rl.algorithms.dr_grpo import dr_grpo_advantages
from tandem.rl.algorithms.groups import usable
from tandem.rl.algorithms.grpo import grpo_advantages
from tandem.rl.algorithms.rloo import rloo_advantages
from tandem.types import FinishReason, Sample, Score, TrainSequence


def group_advantages(config: AlgorithmConfig, rewards: Tensor, valid: Tensor) -> Tensor:
    """The advantage [P, G] of each sample by the recipe's estimator; ``rewards[P, G]`` float64, ``valid[P, G]`` bool."""
    if config.advantage == "grpo":
        return grpo_advantages(rewards, valid, config.advantage_epsilon)
    if config.advantage == "dr_grpo":
        return dr_grpo_advantages(rewards, valid)
    return rloo_advantages(rewards, valid)


def train_sequences(
    config: AlgorithmConfig,
    samples: Sequence[Sample],
    scores: Sequence[Score],
    reference_logprobs: Mapping[str, Sequence[float]] | None,
) -> list[TrainSequence]:
    """One sequence a sample, in the samples' order; samples of a group stand together.

    A sample without a reward (its judge was at fault), one of a group with fewer than two rewards, an aborted one, and, with
    ``mask_truncated``, one that was cut, has a loss mask of zeros. ``reference_logprobs``: by sample id, an entry per token
    of prompt and completion.
    """
    group = config.group_size
    assert len(samples) % group == 0, f"{len(samples)} samples are no whole number of groups of {group}"
    rewards = torch.tensor([score.value if score.value is not None else 0.0 for score in scores], dtype=torch.float64)
    judged = [score.value is not None and s.finish_reason is not FinishReason.ABORT for s, score in zip(samples, scores, strict=True)]
    valid = torch.tensor(judged).view(-1, group)
    advantages = group_advantages(config, rewards.view(-1, group), valid).flatten().tolist()
    counted = usable(valid).flatten().tolist()
    sequences = []
    for sample, advantage, counts in zip(samples, advantages, counted, strict=True):
        prompt, new = len(sample.prompt_token_ids), len(sample.token_ids)
        cut = config.mask_truncated and sample.finish_reason is FinishReason.LENGTH
        blank = (0.0,) * prompt
        sequences.append(
            TrainSequence(
                id=sample.id,
                token_ids=sample.prompt_token_ids + sample.token_ids,
                prompt_length=prompt,
                loss_mask=blank + (float(counts and not cut),) * new,
                advantages=blank + (advantage,) * new,
                rollout_logprobs=blank + sample.logprobs,
                sampling_logprobs=blank + sample.sampling_logprobs,
                reference_logprobs=None if reference_logprobs is None else tuple(reference_logprobs[sample.id]),
                weight_step=sample.weight_versions[-1].step if new else -1,
            )
        )
    return sequences


def unscored_sequences(samples: Sequence[Sample]) -> list[TrainSequence]:
    """The same sequences with every token of the completion counted, for a frozen model's pass over all samples."""
    return [
        TrainSequence(
            id=sample.id,
            token_ids=sample.prompt_token_ids + sample.token_ids,
            prompt_length=len(sample.prompt_token_ids),
            loss_mask=(0.0,) * len(sample.prompt_token_ids) + (1.0,) * len(sample.token_ids),
        )
        for sample in samples
    ]


def minibatches(sequences: Sequence[TrainSequence], count: int, group_size: int) -> list[list[TrainSequence]]:
    """``sequences`` in ``count`` runs of whole groups, as even as they go; never more runs than groups."""
    groups = len(sequences) // group_size
    count = min(count, max(groups, 1))
    bounds = [groups * i // count * group_size for i in range(count + 1)]
    return [list(sequences[low:high]) for low, high in zip(bounds, bounds[1:], strict=False)]
