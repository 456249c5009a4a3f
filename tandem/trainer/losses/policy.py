"""The clipped policy loss (Schulman et al., 2017, "PPO", equation 7) and its variants.

Asymmetrical clip: Yu et al., 2025, "DAPO", equation 10. Dual clip: Ye et al., 2020, "Mastering Complex Control in MOBA
Games", equation 5. Sequence ratio: Zheng et al., 2025, "GSPO", equations 7 and 15."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.config.algorithm import Level
from tandem.trainer.losses.aggregate import sequence_sums
from tandem.trainer.losses.kl import LOG_RATIO_LIMIT


class PolicyLoss(NamedTuple):
    """Per row: ``values[R]`` to be aggregated (with gradient), ``clipped[R]`` 1.0 where the clip is active, ``kl[R]`` the estimate log
    pi_old - log pi of KL(pi_old || pi). The last two carry no gradient."""

    values: Tensor
    clipped: Tensor
    kl: Tensor


def log_ratios(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, sequence_of_row: Tensor, sequences: int, level: Level
) -> Tensor:
    """Returns ``log(pi / pi_old)`` [R], clamped to +-20.

    ``token``: of each token. ``sequence``: the mean over the sequence's counted tokens, on every one of its rows, with the gradient of each
    row's own token (GSPO-token, equation 15)."""
    difference = logprobs - old_logprobs
    if level == "sequence":
        lengths = sequence_sums(mask, sequence_of_row, sequences).clamp(min=1.0)
        means = sequence_sums((difference * mask).detach(), sequence_of_row, sequences) / lengths
        difference = logprobs - logprobs.detach() + means[sequence_of_row]
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, dual_clip: float | None
) -> PolicyLoss:
    """Returns ``-min(rho A, clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high) A)`` with rho = exp(log_ratio); where A < 0 at most
    ``-dual_clip A``. ``log_ratio[R]`` carries gradient, ``advantages[R]`` does not."""
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    values = torch.maximum(unclipped, bounded)
    if dual_clip is not None:
        values = torch.where(advantages < 0, torch.minimum(values, -advantages * dual_clip), values)
    return PolicyLoss(values, (bounded > unclipped).detach().to(values.dtype), -log_ratio.detach())
