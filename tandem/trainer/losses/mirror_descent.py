"""The surrogate of online policy mirror descent (Kimi Team, 2025, "Kimi k1.5", section 2.3.2, equation 3).

For k completions y_j of a prompt, drawn by the policy pi_i at the start of the iteration, its gradient is

    1/k sum_j ( grad log pi(y_j) (r_j - mean r) - tau / 2 grad (log (pi(y_j) / pi_i(y_j)))^2 )

where y_j is a whole completion: its log-probability is the sum over its tokens. There is no clip and no exponential; tau keeps the policy near
pi_i. The paper's advantage r_j - mean r is ``algorithm.name: dr_grpo``, and its mean over completions ``loss_agg_mode: seq-mean-token-sum``.
"""

import torch
from torch import Tensor

from tandem.trainer.losses.aggregate import sequence_sums
from tandem.trainer.losses.policy import PolicyLoss


def mirror_descent_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, sequence_of_row: Tensor, sequences: int, tau: float
) -> PolicyLoss:
    """Returns for each row d = log pi - log pi_i the value ``-A d + tau / 2 D d``, with D the sum of d over its sequence's counted tokens.

    The values of a sequence add up to ``-A D + tau / 2 D^2``, whose gradient is the one above. ``logprobs[R]`` carries gradient,
    ``old_logprobs[R]`` and ``advantages[R]`` do not; ``mask[R]`` is the loss mask."""
    difference = logprobs - old_logprobs
    of_sequence = sequence_sums(difference * mask, sequence_of_row, sequences)[sequence_of_row]
    values = -advantages * difference + 0.5 * tau * of_sequence * difference
    return PolicyLoss(values, torch.zeros_like(values).detach(), -difference.detach())
