"""Section ``algorithm``: the policy-gradient algorithm and its options."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.filter_groups import FilterGroupsConfig
from tandem.config.limits import check_at_least_one, check_float32
from tandem.config.preference import PreferenceLoss, check_preference
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "online_dpo", "distillation"]
PolicyLossName = Literal["clip", "cispo", "mirror_descent"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "k3+"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """The policy-gradient algorithm and its options."""

    name: AlgorithmName = "grpo"
    """The algorithm, by its advantage estimator. `grpo`: (reward - group mean) / (group std + `advantage_epsilon`) (DeepSeekMath, 2024), with the
    sample standard deviation of the group's n rewards, whose sum of squares is divided by n - 1, as in TRL and verl.
    `dr_grpo`: reward - group mean (Liu et al., 2025). `rloo`: reward - mean of the group's other samples (Ahmadian et al., 2024).
    `reinforce_plus_plus`: the reward, normalised by the mean and standard deviation over all tokens of the batch (Hu, 2025);
    `reinforce_plus_plus_baseline`: reward - group mean, normalised in the same way.
    `ppo`: generalized advantage estimation with the values of a critic (section `critic`), normalised over all tokens of the batch
    (Schulman et al., 2016 and 2017).
    `online_dpo`: no advantage; the best and the worst completion of a group are a preference pair (`loss_type`), and groups with equal rewards
    have none (Guo et al., 2024).
    `distillation`: on-policy distillation: log pi_teacher - log pi of each token, so that the loss has the gradient of the reverse KL to the teacher,
    `reference.path` (Gu et al., 2024, "MiniLLM"; Agarwal et al., 2024, "GKD"; Lu et al., 2025, "On-Policy Distillation"). Rewards are only measured.
    `pretrain`, `sft` and `dpo` train on data and have a section `algorithm` of their own."""
    group_size: int = 8
    """Completions per prompt, at least 2; for `reinforce_plus_plus`, `ppo` and `distillation`, which compare no groups, at least 1."""
    loss_type: PreferenceLoss = "sigmoid"
    """For `online_dpo`: the loss of a pair, `sigmoid`, `ipo`, `hinge` or `robust`."""
    beta: float = 0.1
    """For `online_dpo`: the weight of the reference. The larger it is, the less the policy departs from it; for `ipo` it is tau."""
    label_smoothing: float = 0.0
    """For `online_dpo` with `sigmoid` or `robust`: the share of the pairs whose scores are assumed to be the wrong way, below 0.5."""
    gamma: float = 1.0
    """For `ppo`: discount of the reward of the next token."""
    gae_lambda: float = 1.0
    """For `ppo`: lambda of generalized advantage estimation; 1: the return minus the value."""
    advantage_epsilon: float = 1e-6
    """For `grpo`: added to the standard deviation."""
    policy_loss: PolicyLossName = "clip"
    """The loss of a token with ratio rho = pi / pi_old and advantage A. `clip`: -min(rho A, clip(rho) A) (PPO). `cispo`: -clip(rho) A log pi, where
    the clipped ratio has no gradient (MiniMax-M1, 2025). `mirror_descent`: -A log pi + `mirror_descent_tau` / 2 (log rho)^2, whose log-ratio is
    that of the whole completion (Kimi k1.5, 2025)."""
    mirror_descent_tau: float = 0.1
    """For `policy_loss: mirror_descent`: the weight that keeps the policy near the one at the start of the step."""
    clip_ratio_low: float = 0.2
    """The ratio pi / pi_old is clipped to [1 - `clip_ratio_low`, 1 + `clip_ratio_high`]."""
    clip_ratio_high: float = 0.2
    """See `clip_ratio_low`."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative (3.0 is usual). Empty: off."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses to the loss of the batch: `token-mean`, `seq-mean-token-sum`, `seq-mean-token-mean`, or
    `seq-mean-token-sum-norm`, which divides by `length_constant`."""
    length_constant: int = 0
    """Divisor of `seq-mean-token-sum-norm`. 0: `rollout.max_tokens`."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference model (section `reference`) in the loss. 0: no reference model is loaded."""
    kl_in_reward: bool = False
    """Subtract the KL, weighted by `kl_coef`, from the rewards of the tokens, and not add it to the loss."""
    kl_estimator: KLEstimator = "k3"
    """`k1`, `k2`, `k3` (Schulman, 2020), or `k3+`: the value of k3 with the gradient of k2."""
    tis_cap: float | None = None
    """Truncated importance sampling: weights each token by min(pi_old / mu, cap), where mu is the distribution it was drawn from (2.0 is
    usual). Empty: off."""
    tis_level: Level = "token"
    """Level of the importance weights of `tis_cap`: one for each `token`, or one for the whole `sequence`."""
    importance_level: Level = "token"
    """Level of the ratio pi / pi_old: of each `token`, or the length-normalised one of the `sequence` (GSPO)."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Source of pi_old: reported by the `rollout`, or `recompute`d by the trainer before the first update. With `top_k`, `top_p` or `min_p`
    and a temperature other than 1 it must be `recompute`."""
    minibatches: int = 1
    """Optimizer updates per pass over the batch. Its completions with a learned token are divided in the order of their prompts, without shuffling,
    into this many parts of nearly equal number. Each update is normalised by the tokens and completions of its own part; all updates of a step
    have the same learning rate."""
    epochs: int = 1
    """Passes over the batch, with the same minibatches in the same order."""
    mask_truncated: bool = False
    """Exclude completions truncated at the token limit, or ended by `rollout.repetition_detection`, from the loss; they still count in their group's
    statistics."""
    filter_groups: FilterGroupsConfig | None = None
    """Dynamic sampling (DAPO): drop groups whose completions all have the same reward, and draw others. Empty: off. A section of its own, below."""

    @property
    def compares_groups(self) -> bool:
        """Whether an advantage depends on the rewards of the prompt's other completions."""
        return self.name not in ("reinforce_plus_plus", "ppo", "distillation")

    @property
    def has_inference(self) -> bool:
        """Whether a step needs passes of other models over its samples: of the reference for a KL, of PPO's critic for values."""
        return self.needs_reference or self.name == "ppo"

    @property
    def needs_reference(self) -> bool:
        """Whether a step needs the log-probabilities of the reference model."""
        return self.kl_coef > 0 or self.learns_from_pairs or self.name == "distillation"

    @property
    def learns_from_pairs(self) -> bool:
        """Whether the loss is one of preference pairs."""
        return self.name == "online_dpo"

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if self.group_size < 2 and self.compares_groups:
            raise UserError(f"'algorithm.group_size' is {self.group_size}; a group needs at least 2 samples to compare")
        check_at_least_one("algorithm", self, "group_size")
        if self.group_size < 2 and self.filter_groups is not None:
            raise UserError(
                "section 'algorithm.filter_groups' is given and algorithm.group_size is 1: the rewards of a group of one never differ, so every group would be "
                "dropped; raise algorithm.group_size or remove the section"
            )
        if not 0 <= self.advantage_epsilon < float("inf"):
            raise UserError(
                f"'algorithm.advantage_epsilon' is {self.advantage_epsilon}; it must be 0 or more, and finite"
            )
        if not 0 < self.clip_ratio_low <= 1:
            raise UserError(f"'algorithm.clip_ratio_low' is {self.clip_ratio_low}; it must be above 0 and at most 1")
        if not self.clip_ratio_high > 0:
            raise UserError(f"'algorithm.clip_ratio_high' is {self.clip_ratio_high}; it must be above 0")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_ratio_high:
            raise UserError(
                f"'algorithm.dual_clip' is {self.dual_clip}; "
                f"it must be above 1 + clip_ratio_high ({1 + self.clip_ratio_high:g}), or empty"
            )
        if not 0 <= self.kl_coef < float("inf"):
            raise UserError(
                f"'algorithm.kl_coef' is {self.kl_coef}; it must be 0 (no KL) or more, and finite"
            )
        if self.kl_in_reward and self.kl_estimator == "k3+":
            raise UserError("'algorithm.kl_estimator' is 'k3+', which is k3 with another gradient, and a reward has none; set it to k3 or k1")
        if not 0 < self.mirror_descent_tau < float("inf"):
            raise UserError(f"'algorithm.mirror_descent_tau' is {self.mirror_descent_tau}; it must be above 0, and finite")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"'algorithm.{name}' is {getattr(self, name)}; it must be from 0 to 1")
        if self.tis_cap is not None and not self.tis_cap >= 1:
            raise UserError(
                f"'algorithm.tis_cap' is {self.tis_cap}; "
                "it must be at least 1, or empty"
            )
        check_float32("algorithm", self, "advantage_epsilon", "clip_ratio_high", "dual_clip", "kl_coef", "mirror_descent_tau", "tis_cap")
        check_at_least_one("algorithm", self, "minibatches", "epochs")
        if not 0 <= self.length_constant < 2**31:
            # It is multiplied by the number of sequences, in 63 bits.
            raise UserError(f"'algorithm.length_constant' is {self.length_constant}; it must be 0 (automatic) or a number of tokens below 2^31")
        self._refuse_unread()

    @property
    def rounds(self) -> int:
        """The maximum number of rounds of rollout in a step."""
        return 1 if self.filter_groups is None else self.filter_groups.max_num_gen_batches

    def prompts_per_round(self, prompts_per_step: int) -> int:
        """Returns the prompts that are drawn at once: ``rollout.prompts_per_step``, or those of a round of dynamic sampling."""
        return (self.filter_groups.gen_batch_size if self.filter_groups is not None else 0) or prompts_per_step

    def _refuse_unread(self) -> None:
        check_preference(self, "online_dpo")
        if self.learns_from_pairs:
            of_policies = (
                "kl_coef", "policy_loss", "mirror_descent_tau", "clip_ratio_low", "clip_ratio_high", "dual_clip", "loss_agg_mode", "tis_cap",
                "importance_level", "old_logprobs",
            )  # fmt: skip
            refuse_unread("algorithm", self, "algorithm.name is 'online_dpo', whose loss is that of pairs", *of_policies)
        if self.name == "distillation":
            refuse_unread("algorithm", self, "algorithm.name is 'distillation', whose advantage is the KL to the teacher", "kl_coef")
            if self.filter_groups is not None:
                raise UserError(
                    "section 'algorithm.filter_groups' is given and algorithm.name is 'distillation', which learns from groups of equal rewards too; remove it"
                )
        if self.name != "grpo":
            refuse_unread("algorithm", self, f"algorithm.name is '{self.name}'", "advantage_epsilon", fix="set algorithm.name to grpo")
        if self.name != "ppo":
            refuse_unread("algorithm", self, f"algorithm.name is '{self.name}'", "gamma", "gae_lambda", fix="set algorithm.name to ppo")
        if self.loss_agg_mode != "seq-mean-token-sum-norm":
            reason, fix = f"algorithm.loss_agg_mode is '{self.loss_agg_mode}'", "set algorithm.loss_agg_mode to seq-mean-token-sum-norm"
            refuse_unread("algorithm", self, reason, "length_constant", fix=fix)
        if self.kl_coef == 0:
            refuse_unread("algorithm", self, "algorithm.kl_coef is 0", "kl_in_reward", "kl_estimator", fix="raise algorithm.kl_coef")
        reason = f"algorithm.policy_loss is '{self.policy_loss}'"
        if self.policy_loss != "mirror_descent":
            refuse_unread("algorithm", self, reason, "mirror_descent_tau", fix="set algorithm.policy_loss to mirror_descent")
        else:
            unread = ("clip_ratio_low", "clip_ratio_high", "importance_level")
            refuse_unread("algorithm", self, reason, *unread, fix="set algorithm.policy_loss to clip or cispo")
        if self.policy_loss != "clip":
            refuse_unread("algorithm", self, reason, "dual_clip", fix="set algorithm.policy_loss to clip")
        if self.tis_cap is None:
            refuse_unread("algorithm", self, "algorithm.tis_cap is empty", "tis_level", fix="set algorithm.tis_cap (2.0 is usual)")
