"""Group Relative Policy Optimization (GRPO; Shao et al., 2024, "DeepSeekMath", section 4.1): its advantage.

For a prompt q, G completions o_1 .. o_G are drawn from the old policy and scored r_1 .. r_G. GRPO maximises (equation 3)

    J = E[ 1/G sum_i 1/|o_i| sum_t min(rho_it A_it, clip(rho_it, 1 - eps, 1 + eps) A_it) - beta D_KL(pi || pi_ref) ]

    rho_it = pi(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t)
    A_it   = (r_i - mean(r)) / std(r)                                      (section 4.1.2, outcome supervision)
    D_KL   = pi_ref / pi - log(pi_ref / pi) - 1                            (equation 4, Schulman's k3)

The loss is -J (``loss.make_policy_loss``). Variants change one part each: the advantage (``dr_grpo``, ``rloo``, ``reinforce_plus_plus``) or a
part of the loss.
"""

import torch
from torch import Tensor

from tandem.rl.algorithms.groups import group_mean, group_std, usable, zero_std


def grpo_advantages(rewards: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """Returns ``(r - mean(r)) / (std(r) + epsilon)`` within each group [P, G], with the sample standard deviation, as in TRL and verl.

    ``rewards[P, G]``: P prompts, G completions each. ``valid[P, G]`` bool: which completions have a reward; the others are left out
    of the statistics. The result is 0 where not valid, in groups with fewer than two valid completions and in groups of equal rewards.
    """
    valid = usable(valid)
    advantages = (rewards - group_mean(rewards, valid)) / (group_std(rewards, valid) + epsilon)
    # The rounded mean of equal rewards may differ from them; without this, noise would be divided by noise.
    return torch.where(valid & ~zero_std(rewards, valid)[:, None], advantages, 0.0)
