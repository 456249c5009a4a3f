"""On-policy distillation: the student learns from its own samples what the teacher thinks of each token.

The loss of a token at state s is the reverse KL of its distribution to the teacher's,

    KL(pi || pi_T) = sum_x pi(x | s) (log pi(x | s) - log pi_T(x | s)),

whose gradient is E_x[(log pi - log pi_T) grad log pi], because E_x[grad log pi] = 0. So a policy gradient with the advantage log pi_T - log pi of the
token alone, without a later one (a discount of 0), descends it (Lu et al., 2025, "On-Policy Distillation", Thinking Machines Lab; the sampled form of GKD,
Agarwal et al., 2024, with lambda 1 and beta 1; MiniLLM, Gu et al., 2024, adds the KL of later tokens).
"""

from torch import Tensor

from tandem.trainer.losses.kl import kl_estimate


def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Returns log pi_T - log pi of each token [T], clamped to +-20 nats, between raw distributions."""
    return -kl_estimate(logprobs, teacher_logprobs, "k1")
