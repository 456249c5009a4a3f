"""CISPO, the mirror descent of Kimi k1.5 and REINFORCE++ against cases worked by hand, and against the formulas that the papers, verl and TRL
publish, written again here in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.kernels.api import TokenLogprobs
from tandem.model.head_outputs import HeadOutputs
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.rl.algorithms.reinforce_plus_plus import returns_to_go, whitened
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cispo import cispo_loss
from tandem.trainer.losses.mirror_descent import mirror_descent_loss
from tandem.trainer.micro_batch import collate
from tandem.types import Batch, FinishReason, Sample, Score, ScoreState, TrainSequence, UserError, WeightVersion

LOG2 = math.log(2)


def real(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_cispo_equals_the_case_worked_by_hand_and_every_token_keeps_its_gradient() -> None:
    # clip to [0.8, 1.3]. rho = 2 -> 1.3, A = 1, log pi = -1: 1.3. rho = 1/2 -> 0.8, A = -2, log pi = -3: 0.8 * -2 * 3 = -4.8.
    # rho = 1, A = 3, log pi = -2: 6. The gradient of each is -clip(rho) A.
    logprobs = real(-1, -3, -2, grad=True)
    found = cispo_loss(real(LOG2, -LOG2, 0), logprobs, real(1, -2, 3), 0.2, 0.3)
    torch.testing.assert_close(found.values.detach(), real(1.3, -4.8, 6))
    assert found.clipped.tolist() == [1, 1, 0]
    found.values.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, real(-1.3, 1.6, -3))


def test_mirror_descent_equals_the_case_worked_by_hand() -> None:
    # Sequence 0: d = 0.3 and -0.1, D = 0.2, A = 2; sequence 1: d = 0.5 alone, A = -1; tau = 0.4.
    # -A D + tau / 2 D^2: -0.4 + 0.008 and 0.5 + 0.05. The gradient of a token is -A + tau D: -2 + 0.08 and 1 + 0.2.
    logprobs, old = real(-0.7, -1.1, -0.5, grad=True), real(-1, -1, -1)
    rows = torch.tensor([0, 0, 1])
    found = mirror_descent_loss(logprobs, old, real(2, 2, -1), real(1, 1, 1), rows, 2, 0.4)
    torch.testing.assert_close(found.values.detach()[:2].sum(), real(-0.392)[0])
    torch.testing.assert_close(found.values.detach()[2], real(0.55)[0])
    found.values.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, real(-1.92, -1.92, 1.2))
    assert found.clipped.tolist() == [0, 0, 0]


def test_returns_lose_the_penalties_of_a_token_and_those_after_it() -> None:
    # Reward 1 at the end, penalties 0.1, 0.2, 0.4: 1 - 0.7, 1 - 0.6, 1 - 0.4.
    torch.testing.assert_close(returns_to_go(1.0, real(0.1, 0.2, 0.4)), real(0.3, 0.4, 0.6))


def test_whitening_is_over_the_tokens_of_counted_samples_alone() -> None:
    # Counted tokens 0, 0, 3: mean 1, variance (1 + 1 + 4) / 2 = 3.
    first, left_out, second = whitened([real(0, 0), real(100), real(3)], [True, False, True])
    torch.testing.assert_close(torch.cat([first, second]), real(-1, -1, 2) / math.sqrt(3), rtol=1e-8, atol=0)
    assert left_out.tolist() == [0]
    assert [values.tolist() for values in whitened([real(0.1), real(0.1), real(0.1)], [True] * 3)] == [[0]] * 3
    assert whitened([real(5.0)], [True])[0].tolist() == [0]


# -- published formulas over a padded batch: [B, T] with a response mask -------------------------------------------------

LENGTHS, WIDEST, GROUP = (3, 5, 1, 4, 2, 5), 5, 3
MASK = torch.tensor([[float(t < length) for t in range(WIDEST)] for length in LENGTHS], dtype=torch.float64)
REWARDS = real(1.0, 0.0, 0.5, -1.0, 2.0, 0.25)


def padded(seed: int) -> Tensor:
    """Log-probabilities [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(len(LENGTHS), WIDEST, generator=generator, dtype=torch.float64) * 3


NEW, OLD, REFERENCE = (padded(seed) for seed in range(3))


def verl_masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """verl/utils/torch_functional.py, ``masked_whiten`` with the unbiased variance."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean) ** 2 * mask).sum() / count * (count / (count - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def verl_reinforce_plus_plus(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """verl/trainer/ppo/core_algos.py, ``compute_reinforce_plus_plus_outcome_advantage`` with gamma 1."""
    returns = torch.zeros_like(token_rewards)
    running = torch.zeros(len(token_rewards), dtype=torch.float64)
    for t in reversed(range(token_rewards.shape[1])):
        running = token_rewards[:, t] + running
        returns[:, t] = running
        running = running * mask[:, t]
    return verl_masked_whiten(returns, mask) * mask


def verl_reinforce_plus_plus_baseline(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """The same file, ``compute_reinforce_plus_plus_baseline_outcome_advantage``."""
    scores = token_rewards.sum(-1).view(-1, GROUP)
    scores = (scores - scores.mean(1, keepdim=True)).reshape(-1, 1)
    return verl_masked_whiten(scores * mask, mask) * mask


def rewards_of_tokens(kl_coef: float) -> Tensor:
    """verl's ``apply_kl_penalty`` with k1: the reward at the last token, minus the KL of every token."""
    rewards = torch.zeros_like(MASK)
    rewards[range(len(LENGTHS)), [length - 1 for length in LENGTHS]] = REWARDS
    return rewards - kl_coef * (OLD - REFERENCE) * MASK


def batch_of(config: AlgorithmConfig) -> Batch:
    samples, reference = [], {}
    for number, length in enumerate(LENGTHS):
        logprobs = tuple(OLD[number, :length].tolist())
        sample = Sample(
            f"0/p{number // GROUP}/{number % GROUP}", f"p{number // GROUP}", number % GROUP, (1, 2), (3,) * length, logprobs, logprobs,
            (WeightVersion(0, 0),) * length, FinishReason.STOP, "",
        )  # fmt: skip
        samples.append(sample)
        reference[sample.id] = (0.0, 0.0, *REFERENCE[number, :length].tolist())
    scores = [Score(sample.id, ScoreState.NUMBER, reward) for sample, reward in zip(samples, REWARDS.tolist(), strict=True)]
    return make_batch(0, samples, scores, config, 8, reference if config.kl_coef else None)


def advantages_of(batch: Batch) -> Tensor:
    found = torch.zeros_like(MASK)
    for row, sequence in enumerate(batch.sequences):
        found[row, : LENGTHS[row]] = real(*sequence.advantages[2:])
    return found


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_reinforce_plus_plus_has_the_advantages_of_verl(kl_coef: float) -> None:
    kl = {"kl_coef": kl_coef, "kl_in_reward": True, "kl_estimator": "k1"} if kl_coef else {}
    plain = advantages_of(batch_of(AlgorithmConfig(name="reinforce_plus_plus", **kl)))  # type: ignore[arg-type]
    baseline = advantages_of(batch_of(AlgorithmConfig(name="reinforce_plus_plus_baseline", **kl)))  # type: ignore[arg-type]
    torch.testing.assert_close(plain, verl_reinforce_plus_plus(rewards_of_tokens(kl_coef), MASK), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(baseline, verl_reinforce_plus_plus_baseline(rewards_of_tokens(kl_coef), MASK), rtol=1e-6, atol=1e-9)


def test_rloo_with_kl_in_the_reward_has_the_advantages_of_trl() -> None:
    """TRL's RLOOTrainer: the KL of a completion, summed, is subtracted from its reward before the leave-one-out baseline."""
    rewards = REWARDS - 0.3 * ((OLD - REFERENCE) * MASK).sum(1)
    grouped = rewards.view(-1, GROUP)
    baseline = (grouped.sum(1, keepdim=True) - grouped) / (GROUP - 1)
    config = AlgorithmConfig(name="rloo", kl_coef=0.3, kl_in_reward=True, kl_estimator="k1")
    wanted = (grouped - baseline).reshape(-1, 1) * MASK
    torch.testing.assert_close(advantages_of(batch_of(config)), wanted, rtol=1e-6, atol=1e-9)


ADVANTAGES = (REWARDS - REWARDS.view(-1, GROUP).mean(1).repeat_interleave(GROUP)).unsqueeze(1) * MASK


def published_loss(config: AlgorithmConfig, new: Tensor) -> Tensor:
    """The loss of ``config`` over the padded batch, from its publication."""
    difference = (new - OLD) * MASK
    if config.policy_loss == "mirror_descent":
        # Kimi k1.5, equation 3: (r - mean r) log pi(y) - tau / 2 (log (pi(y) / pi_i(y)))^2, a mean over completions. That log pi_i is
        # subtracted in the first term changes the value by a constant.
        ratio = difference.sum(1)
        return (-ADVANTAGES[:, 0] * ratio + config.mirror_descent_tau / 2 * ratio**2).mean()
    # verl, ``compute_policy_loss_cispo``; token-mean.
    clipped = difference.exp().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high).detach()
    return (-clipped * ADVANTAGES * new * MASK).sum() / MASK.sum()


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(name="dr_grpo", policy_loss="cispo", clip_ratio_high=0.28),
        # TRL's cispo clamps from above alone: its ``epsilon_high`` is the bound itself.
        AlgorithmConfig(name="dr_grpo", policy_loss="cispo", clip_ratio_low=1.0, clip_ratio_high=0.5),
        AlgorithmConfig(name="dr_grpo", policy_loss="mirror_descent", mirror_descent_tau=0.7, loss_agg_mode="seq-mean-token-sum"),
    ],
    ids=["cispo", "cispo of TRL", "mirror descent"],
)
def test_loss_and_gradient_are_the_published_ones(config: AlgorithmConfig) -> None:
    sequences: tuple[TrainSequence, ...] = batch_of(config).sequences
    rows = collate(sequences, torch.float64)
    flat = torch.cat([NEW[row, :length] for row, length in enumerate(LENGTHS)]).requires_grad_()
    outputs = HeadOutputs(TokenLogprobs(flat, flat, torch.zeros_like(flat)))
    share = make_policy_loss(config, counts_of(sequences), 1.0)(outputs, rows)
    new = NEW.clone().requires_grad_()
    if config.policy_loss == "cispo" and config.clip_ratio_low == 1.0:
        trl = -torch.clamp((new - OLD).exp(), max=1 + config.clip_ratio_high).detach() * ADVANTAGES * new
        wanted = (trl * MASK).sum() / MASK.sum()
    else:
        wanted = published_loss(config, new)
    torch.testing.assert_close(share.loss, wanted, rtol=1e-6, atol=1e-9)
    share.loss.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    assert flat.grad is not None and new.grad is not None
    torch.testing.assert_close(flat.grad, new.grad[MASK.bool()], rtol=1e-6, atol=1e-9)


def test_the_kl_is_in_the_reward_or_in_the_loss_and_never_in_both() -> None:
    in_reward = AlgorithmConfig(name="rloo", kl_coef=0.3, kl_in_reward=True, kl_estimator="k1")
    sequences = batch_of(in_reward).sequences
    rows = collate(sequences, torch.float64)
    flat = torch.cat([OLD[row, :length] for row, length in enumerate(LENGTHS)])
    outputs = HeadOutputs(TokenLogprobs(flat, flat, torch.zeros_like(flat)))
    shares = [
        make_policy_loss(config, counts_of(sequences), 1.0)(outputs, rows)
        for config in (in_reward, replace(in_reward, kl_in_reward=False), replace(in_reward, kl_in_reward=False, kl_coef=0.0))
    ]
    kl = ((OLD - REFERENCE) * MASK).sum() / MASK.sum()
    assert shares[0].loss == shares[2].loss
    torch.testing.assert_close(shares[1].loss - shares[2].loss, 0.3 * kl)
    torch.testing.assert_close(shares[0].sums["kl"], kl)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (AlgorithmConfig(name="reinforce_plus_plus", group_size=0), "'algorithm.group_size' is 0"),
        (AlgorithmConfig(name="reinforce_plus_plus_baseline", group_size=1), "'algorithm.group_size' is 1"),
        (AlgorithmConfig(kl_coef=0.1, kl_in_reward=True, kl_estimator="k3+"), "'algorithm.kl_estimator' is 'k3+'"),
        (AlgorithmConfig(policy_loss="mirror_descent", mirror_descent_tau=0.0), "'algorithm.mirror_descent_tau' is 0.0"),
    ],
)
def test_a_value_that_cannot_train_is_named(config: AlgorithmConfig, named: str) -> None:
    with pytest.raises(UserError) as caught:
        config.check()
    assert str(caught.value).startswith(named) and "\n" not in str(caught.value)


def test_one_sample_of_a_prompt_is_enough_without_a_group() -> None:
    AlgorithmConfig(name="reinforce_plus_plus", group_size=1).check()
    sample = lambda name: Sample(
        f"0/{name}/0", name, 0, (1,), (2, 3), (-1.0, -1.0), (-1.0, -1.0), (WeightVersion(0, 0),) * 2, FinishReason.STOP, ""
    )
    samples = [sample("a"), sample("b"), sample("c")]
    scores = [Score(s.id, ScoreState.NUMBER, value) for s, value in zip(samples[:2], (1.0, 0.0), strict=True)]
    scores.append(Score(samples[2].id, ScoreState.INFRASTRUCTURE_FAULT, None))
    batch = make_batch(0, samples, scores, AlgorithmConfig(name="reinforce_plus_plus", group_size=1), 8)
    # Four counted tokens 1, 1, 0, 0: mean 1/2, variance 1/3.
    assert [s.advantages[-1] for s in batch.sequences] == pytest.approx([math.sqrt(3) / 2, -math.sqrt(3) / 2, 0], rel=1e-6)
    assert [sum(s.loss_mask) for s in batch.sequences] == [2, 2, 0]


def test_observations_are_in_no_statistic_and_have_no_penalty() -> None:
    plain = Sample("0/a/0", "a", 0, (1,), (2, 3), (-1.0, -2.0), (-1.0, -2.0), (WeightVersion(0, 0),) * 2, FinishReason.STOP, "")
    observed = replace(
        plain, id="0/b/0", prompt_id="b", token_ids=(2, 9, 3), logprobs=(-1.0, 0.0, -2.0), sampling_logprobs=(-1.0, 0.0, -2.0),
        weight_versions=(WeightVersion(0, 0),) * 3, response_mask=(True, False, True),
    )  # fmt: skip
    config = AlgorithmConfig(name="reinforce_plus_plus", group_size=1, kl_coef=0.5, kl_in_reward=True, kl_estimator="k1")
    scores = [Score("0/a/0", ScoreState.NUMBER, 0.0), Score("0/b/0", ScoreState.NUMBER, 0.0)]
    reference = {"0/a/0": (0.0, -2.0, -2.0), "0/b/0": (0.0, -2.0, -7.0, -2.0)}
    batch = make_batch(0, [plain, observed], scores, config, 8, reference)
    # KL 1 and 0 for both: returns -0.5, 0, -0.5, 0; mean -1/4, variance 1/12: -sqrt(3)/2 and sqrt(3)/2.
    half = math.sqrt(3) / 2
    assert batch.sequences[0].advantages == pytest.approx([0, -half, half], rel=1e-6)
    assert batch.sequences[1].advantages == pytest.approx([0, -half, 0, half], rel=1e-6)
