"""Estimators of KL(pi || pi_ref) from tokens drawn from pi (Schulman, 2020, "Approximating KL Divergence")."""

import torch
from torch import Tensor

from tandem.config.algorithm import KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Nats. Log-ratios are clamped to this, so that their exponentials stay finite."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Returns the estimate of each token [R]. With D = log pi - log pi_ref clamped to +-20: ``k1`` D, ``k2`` D^2 / 2, ``k3`` exp(-D) - 1 + D.

    ``logprobs[R]`` carries gradient, ``reference_logprobs[R]`` none. As a term of the loss, only k2 has the gradient of
    the KL in expectation (k1's vanishes, k3's is that of the reverse KL); ``k3+`` therefore has the value of k3 and the
    gradient of k2.
    """
    difference = (logprobs - reference_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    k3 = torch.expm1(-difference) + difference
    if estimator == "k3":
        return k3
    k2 = 0.5 * difference.square()
    return k2 - k2.detach() + k3.detach()
