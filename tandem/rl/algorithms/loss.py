"""The loss of GRPO and its relatives on one micro-batch, put together from this room's parts."""

from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.kernels.api import TokenLogprobs
from tandem.rl.algorithms.importance import truncated_importance
from tandem.rl.algorithms.kl import kl_estimate, mismatch_k3
from tandem.rl.algorithms.policy_loss import log_ratios, policy_loss
from tandem.trainer.losses.aggregate import GlobalCounts, row_weights, weighted_sum
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


def make_grpo_loss(config: AlgorithmConfig, counts: GlobalCounts, temperature: float) -> Loss:
    """The loss ``aggregate(policy loss) + kl_coef * aggregate(KL to the reference)`` as shares of micro-batches.

    ``counts`` are those of the whole batch that the optimizer step is taken on. The ratio is between distributions at
    ``temperature``, which is what the tokens were drawn at; KL is between raw ones, in the loss and not in the reward.
    """

    def loss(logprobs: TokenLogprobs, rows: MicroBatch) -> LossShare:
        new, old, sequences = logprobs.scaled, old_logprobs(rows, temperature), rows.sequence_count
        log_ratio = log_ratios(new, old, rows.mask, rows.sequence_of_row, sequences, config.importance_level)
        policy = policy_loss(log_ratio, rows.advantages, config.clip_ratio_low, config.clip_ratio_high, config.dual_clip)
        values = policy.values
        sums: dict[str, Tensor] = {}
        by_token = row_weights("token-mean", rows.mask, rows.sequence_of_row, rows.sequence_mask_sums, counts)
        if config.tis_cap is not None:
            weight = truncated_importance(
                old,
                rows.sampling_logprobs,
                rows.mask,
                rows.sequence_of_row,
                sequences,
                config.tis_level,
                config.tis_cap,
            )
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
        sums["mismatch_kl"] = weighted_sum(mismatch_k3(logprobs.raw, rows.rollout_logprobs), by_token)
        distance = (logprobs.raw.detach().double() - rows.rollout_logprobs.double()).abs()
        return LossShare(total, sums, {"mismatch_max_abs": distance.max()})

    return loss


def old_logprobs(rows: MicroBatch, temperature: float) -> Tensor:
    """Log pi_old of each row [R]: what the trainer computed before the first update, else what the rollout reported
    (raw at temperature 1, else of the distribution it drew from)."""
    if rows.old_logprobs is not None:
        return rows.old_logprobs
    return rows.rollout_logprobs if temperature == 1.0 else rows.sampling_logprobs
