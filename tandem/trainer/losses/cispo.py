"""CISPO, clipped importance-sampling weights of REINFORCE (MiniMax, 2025, "MiniMax-M1", section 3.1, equations 4 and 5).

The ratio is clipped and carries no gradient, so every token keeps that of its log-probability, also the rare ones (such as "wait")
whose gradient the clip of PPO removes."""

from torch import Tensor

from tandem.trainer.losses.policy import PolicyLoss


def cispo_loss(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> PolicyLoss:
    """Returns ``-sg(clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log pi`` with rho = exp(log_ratio).

    ``logprobs[R]`` (log pi, nats) carries gradient; ``log_ratio[R]`` and ``advantages[R]`` are constants. With ``clip_ratio_low`` 1 there is
    no lower bound, as in the paper."""
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return PolicyLoss(-clipped * advantages * logprobs, (clipped != ratio).to(logprobs.dtype), -log_ratio.detach())
