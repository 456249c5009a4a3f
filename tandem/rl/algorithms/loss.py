"""The loss of a policy update, one function of its section ``algorithm``: a policy loss, aggregated, with the KL to the reference.

    loss = aggregate(w * policy loss(pi / pi_old, A)) + kl_coef * aggregate(KL(pi || pi_ref))

Its parts are modules of ``trainer.losses``: the ratio and the clipped loss (``policy``: PPO, DAPO, dual clip, GSPO), ``cispo``,
``mirror_descent``, the estimators of the KL (``kl``), the weights w against a rollout whose numbers differ (``importance``) and the
aggregation over tokens (``aggregate``).
"""

from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.losses.aggregate import GlobalCounts, row_weights, weighted_sum
from tandem.trainer.losses.cispo import cispo_loss
from tandem.trainer.losses.dpo import make_dpo_loss
from tandem.trainer.losses.importance import truncated_importance
from tandem.trainer.losses.kl import kl_estimate
from tandem.trainer.losses.mirror_descent import mirror_descent_loss
from tandem.trainer.losses.mismatch import mismatch_shares
from tandem.trainer.losses.policy import PolicyLoss, log_ratios, policy_loss
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


def make_loss(config: AlgorithmConfig, counts: GlobalCounts, temperature: float, mismatch_tokens: int = 0) -> Loss:
    """Returns the loss of an update: ``make_policy_loss``, or for ``online_dpo`` that of its preference pairs, between raw distributions."""
    if not config.learns_from_pairs:
        return make_policy_loss(config, counts, temperature, mismatch_tokens)
    return make_dpo_loss(config.loss_type, config.beta, config.label_smoothing, counts.sequences // 2, "actor/dpo_loss", mismatch_tokens)


def make_policy_loss(config: AlgorithmConfig, counts: GlobalCounts, temperature: float, mismatch_tokens: int = 0) -> Loss:
    """Returns the loss ``aggregate(policy loss) + kl_coef * aggregate(KL to the reference)`` as shares of micro-batches.

    ``counts`` are those of the global batch of the optimizer step, so the shares of micro-batches and of ranks add up to its loss. The
    ratio is between distributions at ``temperature``, at which the tokens were drawn; the KL is between raw ones, and is a term of the
    loss unless ``config.kl_in_reward`` or in ``distillation``, where it is only measured. ``mismatch_tokens``: if above 0, the shares also hold
    ``mismatch_kl`` and ``mismatch_max_abs`` of their rows that the weights before the update sampled, as part of a mean over this many tokens."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        logprobs = outputs.logprobs
        new, old, sequences = logprobs.scaled, old_logprobs(rows, temperature), rows.sequence_count
        policy = _policy_loss(config, new, old, rows)
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
        if config.needs_reference:
            assert rows.reference_logprobs is not None, "kl_coef > 0 and distillation need reference log-probabilities"
            kl = kl_estimate(logprobs.raw, rows.reference_logprobs, config.kl_estimator)
            if config.kl_coef > 0 and not config.kl_in_reward:
                total = total + config.kl_coef * weighted_sum(kl, weights)
            sums["kl"] = weighted_sum(kl.detach(), by_token)
        sums["actor/entropy"] = weighted_sum(logprobs.entropy.detach(), by_token)
        sums["actor/ppo_kl"] = weighted_sum(policy.kl, by_token)
        sums["actor/pg_clipfrac"] = weighted_sum(policy.clipped, by_token)
        if mismatch_tokens:
            mismatch, maxima = mismatch_shares(logprobs.raw, rows, mismatch_tokens)
            sums |= mismatch
        return LossShare(total, sums, maxima)

    return loss


def old_logprobs(rows: MicroBatch, temperature: float) -> Tensor:
    """Returns log pi_old of each row [R]: the trainer's values from before the first update if computed, else those of the rollout (raw at
    temperature 1, else of the distribution sampled from)."""
    if rows.old_logprobs is not None:
        return rows.old_logprobs
    return rows.rollout_logprobs if temperature == 1.0 else rows.sampling_logprobs


def _policy_loss(config: AlgorithmConfig, logprobs: Tensor, old: Tensor, rows: MicroBatch) -> PolicyLoss:
    """Returns the policy loss of each row, by ``config.policy_loss``."""
    sequences = rows.sequence_count
    if config.policy_loss == "mirror_descent":
        return mirror_descent_loss(
            logprobs, old, rows.advantages, rows.mask, rows.sequence_of_row, sequences, config.mirror_descent_tau
        )
    log_ratio = log_ratios(logprobs, old, rows.mask, rows.sequence_of_row, sequences, config.importance_level)
    if config.policy_loss == "cispo":
        return cispo_loss(log_ratio, logprobs, rows.advantages, config.clip_ratio_low, config.clip_ratio_high)
    return policy_loss(log_ratio, rows.advantages, config.clip_ratio_low, config.clip_ratio_high, config.dual_clip)
