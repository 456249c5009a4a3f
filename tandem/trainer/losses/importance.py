"""Truncated importance sampling between the policy that drew the tokens and the one the ratio starts from.

Espeholt et al., 2018 ("IMPALA", equation 1: rho = min(rho_bar, pi / mu)); Yao et al., 2025 ("Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training"), for rollout engines whose numbers differ from the trainer's.
"""

from torch import Tensor

from tandem.config.algorithm import Level
from tandem.trainer.losses.aggregate import sequence_sums
from tandem.trainer.losses.kl import LOG_RATIO_LIMIT


def truncated_importance(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    sequence_of_row: Tensor,
    sequences: int,
    level: Level,
    cap: float,
) -> Tensor:
    """Returns ``min(pi_old / mu, cap)`` for each row [R], without gradient.

    ``old_logprobs[R]``: log pi_old. ``sampling_logprobs[R]``: log mu, of the distribution each token was drawn from.
    ``level`` token: the ratio of each token. ``sequence``: one ratio for all rows of a sequence, the product over its
    counted tokens (``mask[R]``). Log-ratios are clamped to +-20.
    """
    log_ratio = (old_logprobs - sampling_logprobs).detach()
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio * mask, sequence_of_row, sequences)[sequence_of_row]
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
