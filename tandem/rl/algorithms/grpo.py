"""Group Relative Policy Optimization (GRPO; Shao et al., 2024, "DeepSeekMath", section 4.1): its advantage and its loss.

For a prompt q, G completions o_1 .. o_G are drawn from the old policy and scored r_1 .. r_G. GRPO maximises (equation 3)

    J = E[ 1/G sum_i 1/|o_i| sum_t min(rho_it A_it, clip(rho_it, 1 - eps, 1 + eps) A_it) - beta D_KL(pi || pi_ref) ]

    rho_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)
    A_it   = (r_i - mean(r)) / std(r)                                      (section 4.1.2, outcome supervision)
    D_KL   = pi_ref / pi - log(pi_ref / pi) - 1                            (equation 4, Schulman's k3)

The loss is -J. Variants change one part each: the advantage (``dr_grpo``, ``rloo``), the aggregation over tokens
(``trainer.losses.aggregate``), the ratio and its clip (``trainer.losses.policy``: DAPO, dual clip, GSPO), the estimator of the KL
(``trainer.losses.kl``) and the correction for a rollout whose numbers differ (``trainer.losses.importance``).
"""

import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.kernels.api import TokenLogprobs
from tandem.rl.algorithms.groups import group_mean, group_std, usable, zero_std
from tandem.trainer.losses.aggregate import GlobalCounts, row_weights, weighted_sum
from tandem.trainer.losses.importance import truncated_importance
from tandem.trainer.losses.kl import kl_estimate
from tandem.trainer.losses.mismatch import mismatch_k3
from tandem.trainer.losses.policy import log_ratios, policy_loss
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


def grpo_advantages(rewards: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """Returns ``(r - mean(r)) / (std(r) + epsilon)`` within each group [P, G], with the sample standard deviation, as in TRL and verl.

    ``rewards[P, G]``: P prompts, G completions each. ``valid[P, G]`` bool: which completions have a reward; the others are left out
    of the statistics. The result is 0 where not valid, in groups with fewer than two valid completions and in groups of equal rewards.
    """
    valid = usable(valid)
    advantages = (rewards - group_mean(rewards, valid)) / (group_std(rewards, valid) + epsilon)
    # The rounded mean of equal rewards may differ from them; without this, noise would be divided by noise.
    return torch.where(valid & ~zero_std(rewards, valid)[:, None], advantages, 0.0)


def make_grpo_loss(config: AlgorithmConfig, counts: GlobalCounts, temperature: float, mismatch_tokens: int = 0) -> Loss:
    """Returns the loss ``aggregate(policy loss) + kl_coef * aggregate(KL to the reference)`` as shares of micro-batches.

    ``counts`` are those of the global batch of the optimizer step, so the shares of micro-batches and of ranks add up to its loss. The
    ratio is between distributions at ``temperature``, at which the tokens were drawn; the KL is between raw ones, and is a term of the
    loss, not of the reward. ``mismatch_tokens``: where above 0, the shares also hold ``mismatch_kl`` and ``mismatch_max_abs`` of their
    rows, as part of a mean over this many tokens."""

    def loss(logprobs: TokenLogprobs, rows: MicroBatch) -> LossShare:
        new, old, sequences = logprobs.scaled, old_logprobs(rows, temperature), rows.sequence_count
        log_ratio = log_ratios(new, old, rows.mask, rows.sequence_of_row, sequences, config.importance_level)
        policy = policy_loss(log_ratio, rows.advantages, config.clip_ratio_low, config.clip_ratio_high, config.dual_clip)
        values = policy.values
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        by_token = row_weights("token-mean", rows.mask, rows.sequence_of_row, rows.sequence_mask_sums, counts)
        if config.tis_cap is not None:
            level, cap = config.tis_level, config.tis_cap
            weight = truncated_importance(old, rows.sampling_logprobs, rows.mask, rows.sequence_of_row, sequences, level, cap)
            values = values * weight
            sums["actor/importance_weight"] = weighted_sum(weight, by_token)
        weights = row_weights(config.loss_agg_mode, rows.mask, rows.sequence_of_row, rows.sequence_mask_sums, counts)
        total = weighted_sum(values, weights)
        sums["actor/pg_loss"] = total.detach()
        if config.kl_coef > 0:
            assert rows.reference_logprobs is not None, "kl_coef > 0 needs reference log-probabilities"
            kl = kl_estimate(logprobs.raw, rows.reference_logprobs, config.kl_estimator)
            total = total + config.kl_coef * weighted_sum(kl, weights)
            sums["kl"] = weighted_sum(kl.detach(), by_token)
        sums["actor/entropy"] = weighted_sum(logprobs.entropy.detach(), by_token)
        sums["actor/ppo_kl"] = weighted_sum(policy.kl, by_token)
        sums["actor/pg_clipfrac"] = weighted_sum(policy.clipped, by_token)
        if mismatch_tokens:
            sums["mismatch_kl"] = weighted_sum(mismatch_k3(logprobs.raw, rows.rollout_logprobs), rows.mask.double() / mismatch_tokens)
            distance = (logprobs.raw.detach().double() - rows.rollout_logprobs.double()).abs()
            # A rank without data passes a micro-batch without rows.
            maxima["mismatch_max_abs"] = distance.max() if len(distance) else distance.sum()
        return LossShare(total, sums, maxima)

    return loss


def old_logprobs(rows: MicroBatch, temperature: float) -> Tensor:
    """Returns log pi_old of each row [R]: the trainer's values from before the first update if computed, else those of the rollout (raw at
    temperature 1, else of the distribution sampled from)."""
    if rows.old_logprobs is not None:
        return rows.old_logprobs
    return rows.rollout_logprobs if temperature == 1.0 else rows.sampling_logprobs
