"""Builds the batch of one step from scored samples: groups, advantages and loss masks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.rl.algorithms.distillation import distillation_advantages
from tandem.rl.algorithms.dr_grpo import dr_grpo_advantages
from tandem.rl.algorithms.gae import generalized_advantages, token_rewards
from tandem.rl.algorithms.groups import usable
from tandem.rl.algorithms.grpo import grpo_advantages
from tandem.rl.algorithms.online_dpo import pairs_of
from tandem.rl.algorithms.reinforce_plus_plus import returns_to_go, whitened
from tandem.rl.algorithms.rloo import rloo_advantages
from tandem.trainer.losses.kl import kl_estimate
from tandem.types import Batch, FinishReason, Sample, Score, TrainSequence


def group_advantages(config: AlgorithmConfig, rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns the advantages [P, G] of ``config.name``, before ``token_advantages``."""
    if config.name == "grpo":
        return grpo_advantages(rewards, valid, config.advantage_epsilon)
    if config.name == "rloo":
        return rloo_advantages(rewards, valid)
    return dr_grpo_advantages(rewards, valid) if config.compares_groups else rewards


def make_batch(
    step: int,
    samples: Sequence[Sample],
    scores: Sequence[Score],
    config: AlgorithmConfig,
    max_tokens: int,
    reference_logprobs: Mapping[str, Sequence[float]] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
    mask_off_policy: bool = False,
) -> Batch:
    """Returns the batch of optimizer step ``step``; ``scores`` are matched to ``samples`` by id.

    A group is all samples of one prompt. A sample without a reward (infrastructure fault, or aborted) is left out of its group's statistics
    and has a loss mask of zeros; so has every sample of a group with fewer than two rewards and, with ``config.mask_truncated``, one
    that is truncated (which still counts in the statistics). ``reference_logprobs``: by sample id, one entry per token of prompt
    and completion. ``max_tokens``: the maximum length of a completion, Dr. GRPO's constant unless ``config.length_constant`` is set.

    A token that weights of a step before ``step`` drew, as in a partial rollout, is marked as off-policy; with ``mask_off_policy`` it is not in the
    loss mask.

    The batch of ``online_dpo`` begins with the pairs of its groups, chosen and rejected side by side; a group without a pair has loss masks of
    zeros.

    A sample with branches is several sequences: its advantage is that of each of them, and with ``config.kl_in_reward`` its reward is lowered by the KL
    of all.

    With ``config.kl_in_reward`` every token's reward is lowered by ``kl_coef`` times its KL to the reference. ``reinforce_plus_plus`` has no
    groups: a sample counts with its own reward alone. Neither has ``ppo``, whose critic gives ``values``: by sample id, of the state before each token, one
    entry per token of prompt and completion. The reference of ``distillation`` is the teacher, and rewards have no part in its advantages."""
    score_of = {score.sample_id: score for score in scores}
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_id, []).append(index)
    widest = max((len(members) for members in groups.values()), default=1)
    owners = [index for index, sample in enumerate(samples) for _ in sample.sequences]
    episodes, samples = samples, [each for sample in samples for each in sample.sequences]
    penalties = _kl_penalties(config, samples, reference_logprobs)
    is_grouped = config.compares_groups
    charged = [0.0] * len(episodes)
    for owner, penalty in zip(owners, penalties, strict=True) if config.kl_in_reward else ():
        charged[owner] += float(penalty.sum())
    rewards = torch.zeros(len(groups), widest, dtype=torch.float64)
    valid = torch.zeros(len(groups), widest, dtype=torch.bool)
    for row, members in enumerate(groups.values()):
        for column, index in enumerate(members):
            value = score_of[episodes[index].id].value
            is_excluded = config.learns_from_pairs and not _may_be_in_a_pair(config, episodes[index])
            if value is not None and episodes[index].finish_reason is not FinishReason.ABORT and not is_excluded:
                rewards[row, column], valid[row, column] = value, True
                if is_grouped:
                    rewards[row, column] -= charged[index]
    if config.learns_from_pairs:
        assert len(samples) == len(episodes), "a recipe of agents does not learn from pairs"
        pairs = pairs_of(list(groups.values()), rewards, valid)
        return Batch(step, tuple(_paired(step, samples, pairs, reference_logprobs)), config.length_constant or max_tokens)
    advantages, counted = group_advantages(config, rewards, valid).tolist(), (usable(valid) if is_grouped else valid).tolist()
    place = {
        index: (row, column) for row, members in enumerate(groups.values()) for column, index in enumerate(members)
    }
    counts = [
        counted[place[owner][0]][place[owner][1]] and not (config.mask_truncated and episodes[owner].is_truncated) for owner in owners
    ]
    of_samples = [advantages[place[owner][0]][place[owner][1]] for owner in owners]
    if config.name == "distillation":
        assert reference_logprobs is not None, "distillation needs the teacher's log-probabilities"
        of_tokens, returns = [distillation_advantages(*_logprobs(sample, reference_logprobs)) for sample in samples], None
    elif config.name == "ppo":
        assert values is not None, "ppo needs the critic's values"
        of_tokens, returns = _estimated(config, samples, of_samples, penalties, counts, values)
    else:
        of_tokens, returns = token_advantages(config, of_samples, penalties, counts), None
    sequences = [
        train_sequence(sample, of_tokens[i].tolist(), counts[i], None if reference_logprobs is None else reference_logprobs[sample.id])
        for i, sample in enumerate(samples)
    ]
    if values is not None and returns is not None:
        sequences = [
            replace(sequence, values=tuple(values[sequence.id]), returns=_of_every_token(sample, own.tolist()))
            for sequence, sample, own in zip(sequences, samples, returns, strict=True)
        ]
    sequences = [_with_off_policy(sequence, sample, step, mask_off_policy) for sequence, sample in zip(sequences, samples, strict=True)]
    return Batch(step, tuple(sequences), config.length_constant or max_tokens)


def _paired(
    step: int, samples: Sequence[Sample], pairs: Sequence[tuple[int, int]], reference_logprobs: Mapping[str, Sequence[float]] | None
) -> list[TrainSequence]:
    """Returns ``samples`` as training sequences: those of ``pairs``, each the chosen one and then the rejected one, and the others, whose loss masks
    are zeros, after them. Old tokens are learned too: the loss of a pair does not depend on the policy that drew it."""
    assert reference_logprobs is not None, "preference pairs need reference log-probabilities"
    in_pairs = [index for pair in pairs for index in pair]
    others = sorted(set(range(len(samples))) - set(in_pairs))
    ordered = [(samples[index], number < len(in_pairs)) for number, index in enumerate([*in_pairs, *others])]
    return [
        _with_off_policy(train_sequence(sample, (), counts, reference_logprobs[sample.id]), sample, step, masked=False)
        for sample, counts in ordered
    ]


def _estimated(
    config: AlgorithmConfig, samples: Sequence[Sample], rewards: Sequence[float], penalties: Sequence[Tensor], counts: Sequence[bool],
    values: Mapping[str, Sequence[float]],
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns PPO's whitened advantages and the critic's returns of the sampled tokens of each sample, float64 [T_i]."""
    estimated = []
    for sample, reward, penalty in zip(samples, rewards, penalties, strict=True):
        of_completion = values[sample.id][len(sample.prompt_token_ids) :]
        own = [value for value, is_sampled in zip(of_completion, sample.is_sampled, strict=True) if is_sampled]
        of_tokens = token_rewards(reward, penalty)
        estimated.append(generalized_advantages(of_tokens, torch.tensor(own, dtype=torch.float64), config.gamma, config.gae_lambda))
    return whitened([one.advantages for one in estimated], counts), [one.returns for one in estimated]


def _may_be_in_a_pair(config: AlgorithmConfig, sample: Sample) -> bool:
    """Returns whether a pair may have ``sample``: an empty completion has nothing to learn."""
    return sample.sampled_tokens > 0 and not (config.mask_truncated and sample.is_truncated)


def token_advantages(config: AlgorithmConfig, advantages: Sequence[float], penalties: Sequence[Tensor], counts: Sequence[bool]) -> list[Tensor]:
    """Returns the advantage of each sampled token of each sample, float64 [T_i].

    Args:
        advantages: by sample, of ``group_advantages``.
        penalties: [T_i] by sample: what lowers the rewards of its tokens.
        counts: which samples are in the loss mask; the statistics of REINFORCE++ are those of their tokens.
    """
    if config.name == "reinforce_plus_plus":
        return whitened([returns_to_go(advantage, penalty) for advantage, penalty in zip(advantages, penalties, strict=True)], counts)
    counted = [len(penalty) for penalty in penalties]
    of_tokens = list(torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(counted, dtype=torch.int64)).split(counted))
    return whitened(of_tokens, counts) if config.name == "reinforce_plus_plus_baseline" else of_tokens


def _kl_penalties(config: AlgorithmConfig, samples: Sequence[Sample], reference_logprobs: Mapping[str, Sequence[float]] | None) -> Sequence[Tensor]:
    """Returns for each sample ``kl_coef`` times the estimated KL of each token that the model sampled [T], between the raw distribution that the rollout
    recorded and the reference's; zeros without ``kl_in_reward``."""
    if not config.kl_in_reward:
        counts = [sample.sampled_tokens for sample in samples]
        zeros: Sequence[Tensor] = torch.zeros(sum(counts), dtype=torch.float64).split(counts)
        return zeros
    assert reference_logprobs is not None, "kl_in_reward needs reference log-probabilities"
    return [config.kl_coef * kl_estimate(*_logprobs(sample, reference_logprobs), config.kl_estimator) for sample in samples]


def _logprobs(sample: Sample, reference_logprobs: Mapping[str, Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Returns the raw log-probabilities of each token that the model sampled, as the rollout recorded them and the reference's, float64 [T]."""
    reference = reference_logprobs[sample.id][len(sample.prompt_token_ids) :]
    pairs = [pair for *pair, is_sampled in zip(sample.logprobs, reference, sample.is_sampled, strict=True) if is_sampled]
    recorded, referred = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return recorded, referred


def train_sequence(
    sample: Sample, advantages: Sequence[float] = (), counts: bool = True, reference_logprobs: Sequence[float] | None = None
) -> TrainSequence:
    """Returns ``sample`` as a training sequence. ``advantages``: of the tokens that the model sampled, in order (empty: 0); ``counts``: these
    tokens are in the loss mask."""
    prompt = len(sample.prompt_token_ids)
    before = (0.0,) * prompt
    return TrainSequence(
        id=sample.id,
        token_ids=sample.prompt_token_ids + sample.token_ids,
        prompt_length=prompt,
        loss_mask=before + (tuple(map(float, sample.is_sampled)) if counts else (0.0,) * len(sample.token_ids)),
        advantages=_of_every_token(sample, advantages or (0.0,) * sample.sampled_tokens),
        rollout_logprobs=before + sample.logprobs,
        sampling_logprobs=before + sample.sampling_logprobs,
        reference_logprobs=None if reference_logprobs is None else tuple(reference_logprobs),
        weight_step=max((version.step for version in sample.sampled_weight_versions), default=-1),
        response_mask=(False,) * prompt + sample.response_mask if sample.response_mask else (),
        routed_experts=sample.routed_experts,
    )


def without_replay(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Returns ``sequences`` for another model than the one that drew them, whose routers choose for themselves."""
    return [replace(sequence, routed_experts=None) if sequence.routed_experts is not None else sequence for sequence in sequences]


def _of_every_token(sample: Sample, sampled: Sequence[float]) -> tuple[float, ...]:
    """Returns ``sampled``, a value for each token that the model sampled, as an entry per token of prompt and completion, 0.0 elsewhere."""
    if not sample.response_mask:
        return (0.0,) * len(sample.prompt_token_ids) + tuple(sampled)
    values = iter(sampled)
    return (0.0,) * len(sample.prompt_token_ids) + tuple(next(values) if is_sampled else 0.0 for is_sampled in sample.is_sampled)


def _with_off_policy(sequence: TrainSequence, sample: Sample, step: int, masked: bool) -> TrainSequence:
    """Returns ``sequence`` with its tokens of weights before ``step`` marked, and ``masked`` in the loss."""
    is_old = tuple(version is not None and version.step < step for version in sample.weight_versions)
    if not any(is_old):
        return sequence
    off_policy = (False,) * sequence.prompt_length + is_old
    mask = tuple(0.0 if masked and old else value for value, old in zip(sequence.loss_mask, off_policy, strict=True))
    return replace(sequence, loss_mask=mask, off_policy=off_policy)
