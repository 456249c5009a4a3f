"""PPO with a critic: generalized advantage estimation and the value loss are the published formulas of TRL and verl, written here in float64."""

import math

import pytest
import torch
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.critic import CriticConfig
from tandem.config.recipe import recipe_of
from tandem.kernels.api import TokenLogprobs
from tandem.model.head_outputs import HeadOutputs
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.critic import critic_metrics
from tandem.rl.algorithms.gae import generalized_advantages, token_rewards
from tandem.rl.algorithms.loss import make_policy_loss
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.value import make_value_loss, value_loss, with_value_loss
from tandem.trainer.micro_batch import collate
from tandem.types import FinishReason, Sample, Score, ScoreState, UserError, WeightVersion


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def verl_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """verl's ``compute_gae_advantage_return`` [B, T]: observation tokens (mask 0) keep the next value and the last advantage; advantages are whitened over
    the masked tokens with an unbiased variance and 1e-8."""
    after, last, backwards = torch.zeros(len(rewards), dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.float64), []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        candidate = delta + gamma * lam * last
        after = values[:, t] * mask[:, t] + (1 - mask[:, t]) * after
        last = candidate * mask[:, t] + (1 - mask[:, t]) * last
        backwards.append(last)
    advantages = torch.stack(backwards[::-1], dim=1)
    returns, count = advantages + values, mask.sum()
    mean = (advantages * mask).sum() / count
    variance = ((advantages - mean).square() * mask).sum() / count * count / (count - 1)
    return (advantages - mean) * torch.rsqrt(variance + 1e-8), returns


def test_gae_of_a_case_worked_by_hand() -> None:
    """gamma 1/2, lambda 1/2, values 1, 2, 4, reward 8 at the end: deltas 0, 0, 4, so advantages 1/4, 1, 4 and returns 5/4, 3, 8."""
    found = generalized_advantages(real(0, 0, 8), real(1, 2, 4), 0.5, 0.5)
    assert found.advantages.tolist() == [0.25, 1.0, 4.0]
    assert found.returns.tolist() == [1.25, 3.0, 8.0]


def test_gae_with_lambda_1_is_the_return_minus_the_value_and_with_lambda_0_the_temporal_difference() -> None:
    rewards, values = real(1, -2, 3, 0.5), real(0.3, -0.1, 2, 1)
    whole = generalized_advantages(rewards, values, 1.0, 1.0)
    assert torch.allclose(whole.returns, rewards.flip(0).cumsum(0).flip(0), rtol=0, atol=1e-12)
    one = generalized_advantages(rewards, values, 0.9, 0.0)
    assert torch.allclose(one.advantages, rewards + 0.9 * real(-0.1, 2, 1, 0) - values, rtol=0, atol=1e-12)


def test_the_score_is_the_reward_of_the_last_token_that_the_policy_wrote() -> None:
    assert token_rewards(2.0, real(0.5, 0, 1)).tolist() == [-0.5, 0.0, 1.0]
    assert token_rewards(2.0, real()).tolist() == []


def sample_of(number: int, length: int, generator: torch.Generator, observed: bool) -> Sample:
    tokens = tuple(torch.randint(5, 50, (length,), generator=generator).tolist())
    logprobs = tuple((-torch.rand(length, generator=generator, dtype=torch.float64)).tolist())
    mask = tuple(not observed or i % 4 not in (1, 2) for i in range(length))
    return Sample(
        f"0/{number}/0", f"{number}", 0, (1, 2, 3), tokens, logprobs, logprobs, (WeightVersion(0, 0),), FinishReason.STOP, "",
        response_mask=mask if observed else (),
    )  # fmt: skip


@pytest.mark.parametrize("observed", [False, True], ids=["every token sampled", "with observations"])
@pytest.mark.parametrize(("gamma", "lam", "kl_coef"), [(1.0, 1.0, 0.0), (0.97, 0.9, 0.2)])
def test_advantages_and_returns_of_a_batch_are_those_of_verl(gamma: float, lam: float, kl_coef: float, observed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    samples = [sample_of(i, length, generator, observed) for i, length in enumerate((4, 9, 1, 6))]
    prompt, longest = 3, 9
    values = {s.id: tuple(torch.randn(prompt + len(s.token_ids), generator=generator, dtype=torch.float64).tolist()) for s in samples}
    reference = {s.id: tuple((-torch.rand(prompt + len(s.token_ids), generator=generator, dtype=torch.float64)).tolist()) for s in samples}
    scores = [Score(s.id, ScoreState.NUMBER, float(i) - 1.3) for i, s in enumerate(samples)]
    kl = {"kl_coef": kl_coef, "kl_in_reward": True, "kl_estimator": "k1"} if kl_coef else {}
    config = AlgorithmConfig(name="ppo", group_size=1, gamma=gamma, gae_lambda=lam, **kl)
    batch = make_batch(0, samples, scores, config, longest, reference if kl_coef else None, values)

    rewards, table, mask = (torch.zeros(len(samples), longest, dtype=torch.float64) for _ in range(3))
    for row, (sample, score) in enumerate(zip(samples, scores, strict=True)):
        count = len(sample.token_ids)
        mask[row, :count] = torch.tensor(sample.is_sampled, dtype=torch.float64)
        table[row, :count] = torch.tensor(values[sample.id][prompt:], dtype=torch.float64)
        difference = torch.tensor(sample.logprobs, dtype=torch.float64) - torch.tensor(reference[sample.id][prompt:], dtype=torch.float64)
        rewards[row, :count] = -kl_coef * difference * mask[row, :count]
        rewards[row, int(mask[row].nonzero().max())] += score.value
    advantages, returns = verl_gae(rewards, table, mask, gamma, lam)
    for row, sequence in enumerate(batch.sequences):
        kept = mask[row].bool().tolist()
        for name, wanted in (("advantages", advantages[row]), ("returns", returns[row])):
            own = torch.tensor(getattr(sequence, name)[prompt:], dtype=torch.float64)
            expected = [value for value, is_kept in zip(wanted.tolist(), kept, strict=True) if is_kept]
            found = [value for value, is_kept in zip(own.tolist(), kept, strict=False) if is_kept]
            assert found == pytest.approx(expected, rel=0, abs=1e-6)
        assert sequence.values == values[sequence.id]
        assert [bool(value) for value in sequence.loss_mask[prompt:]] == kept[: len(sequence.loss_mask) - prompt]


def test_a_sample_without_a_score_is_in_no_advantage_and_no_loss() -> None:
    generator = torch.Generator().manual_seed(5)
    samples = [sample_of(i, length, generator, False) for i, length in enumerate((4, 9, 6))]
    values = {s.id: (0.0,) * (3 + len(s.token_ids)) for s in samples}
    scores = [Score(s.id, ScoreState.NUMBER, float(i)) for i, s in enumerate(samples[:2])]
    config = AlgorithmConfig(name="ppo", group_size=1)
    faulty = make_batch(0, samples, [*scores, Score(samples[2].id, ScoreState.INFRASTRUCTURE_FAULT, None)], config, 9, None, values)
    alone = make_batch(0, samples[:2], scores, config, 9, None, values)
    assert faulty.sequences[:2] == alone.sequences
    assert not any(faulty.sequences[2].loss_mask) and not any(faulty.sequences[2].advantages)


def test_value_loss_is_that_of_trl_and_verl() -> None:
    """``0.5 * masked_mean(max((v - r)^2, (clip(v, v_old - c, v_old + c) - r)^2))`` and the share of rows in which the clipped term is larger."""
    generator = torch.Generator().manual_seed(7)
    predicted, old, returns = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))
    predicted.requires_grad_()
    clipped = torch.clamp(predicted, old - 0.2, old + 0.2)
    one, two = (predicted - returns) ** 2, (clipped - returns) ** 2
    wanted, share = 0.5 * torch.max(one, two).mean(), (two > one).double().mean()
    (expected,) = torch.autograd.grad(wanted, predicted)
    found = value_loss(predicted, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(found.values.mean(), predicted)
    assert abs(found.values.mean().item() - wanted.item()) < 1e-12 and found.clipped.mean() == share > 0
    assert (gradient - expected).abs().max() < 1e-15
    plain = value_loss(predicted, old, returns, None)
    assert torch.equal(plain.values, 0.5 * one) and not plain.clipped.any()


def test_value_loss_of_micro_batches_adds_up_to_that_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    samples = [sample_of(i, length, generator, i == 1) for i, length in enumerate((4, 9, 6))]
    values = {s.id: tuple(torch.randn(3 + len(s.token_ids), generator=generator).tolist()) for s in samples}
    scores = [Score(s.id, ScoreState.NUMBER, float(i)) for i, s in enumerate(samples)]
    batch = make_batch(0, samples, scores, AlgorithmConfig(name="ppo", group_size=1), 9, None, values)
    loss = make_value_loss(0.2, "token-mean", counts_of(batch.sequences))

    def total(parts: list[int]) -> tuple[float, float]:
        rows = collate([batch.sequences[i] for i in parts], torch.float64)
        share = loss(HeadOutputs(of_value=rows.values + 0.5), rows)
        return share.loss.item(), share.sums["critic/vf_clipfrac"].item()

    whole, parts = total([0, 1, 2]), [total([i]) for i in range(3)]
    assert whole == pytest.approx([math.fsum(column) for column in zip(*parts, strict=True)], rel=1e-12)


def test_loss_of_a_shared_trunk_is_that_of_the_policy_and_a_share_of_that_of_the_values() -> None:
    generator = torch.Generator().manual_seed(5)
    samples = [sample_of(i, length, generator, False) for i, length in enumerate((4, 9))]
    values = {s.id: tuple(torch.randn(3 + len(s.token_ids), generator=generator).tolist()) for s in samples}
    scores = [Score(s.id, ScoreState.NUMBER, float(i)) for i, s in enumerate(samples)]
    config = AlgorithmConfig(name="ppo", group_size=1)
    batch = make_batch(0, samples, scores, config, 9, None, values)
    counts, rows = counts_of(batch.sequences), collate(batch.sequences, torch.float64)
    new = (rows.rollout_logprobs + 0.1).requires_grad_()
    outputs = HeadOutputs(TokenLogprobs(new, new, torch.zeros_like(new)), (rows.values + 0.5).requires_grad_())
    policy, value = make_policy_loss(config, counts, 1.0), make_value_loss(0.2, "token-mean", counts)
    both = with_value_loss(policy, value, 0.25)(outputs, rows)
    assert both.loss.item() == pytest.approx(policy(outputs, rows).loss.item() + 0.25 * value(outputs, rows).loss.item(), rel=1e-12)
    assert both.sums.keys() == policy(outputs, rows).sums.keys() | value(outputs, rows).sums.keys()


def test_metrics_of_a_critic_are_over_the_counted_tokens() -> None:
    generator = torch.Generator().manual_seed(5)
    samples = [sample_of(i, length, generator, i == 1) for i, length in enumerate((4, 9, 6))]
    values = {s.id: tuple(torch.randn(3 + len(s.token_ids), generator=generator).tolist()) for s in samples}
    scores = [Score(s.id, ScoreState.NUMBER, float(i)) for i, s in enumerate(samples)]
    batch = make_batch(0, samples, scores, AlgorithmConfig(name="ppo", group_size=1), 9, None, values)
    columns = {name: real(*(getattr(s, name)[i] for s in batch.sequences for i, m in enumerate(s.loss_mask) if m)) for name in ("values", "returns")}
    metrics = critic_metrics(batch.sequences)
    for name, column in columns.items():
        assert metrics[f"critic/{name}/mean"] == pytest.approx(column.mean().item())
        assert (metrics[f"critic/{name}/max"], metrics[f"critic/{name}/min"]) == (column.max().item(), column.min().item())
    # verl: 1 - var(returns - values) / var(returns), of which the unbiased factors cancel.
    explained = 1 - (columns["returns"] - columns["values"]).var() / columns["returns"].var()
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained.item())
    assert metrics["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-12)


MODEL = {"path": "model"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"algorithm": {"gamma": 0.9}}, "'algorithm.gamma' is 0.9, which is not read: algorithm.name is 'grpo'"),
        ({"algorithm": {"name": "ppo", "gae_lambda": 1.5}}, "'algorithm.gae_lambda' is 1.5; it must be from 0 to 1"),
        ({"critic": {"value_clip": 0.5}}, "section 'critic' is given and algorithm.name is 'grpo', which has no critic"),
        ({"algorithm": {"name": "ppo"}, "critic": {"value_clip": 0}}, "'critic.value_clip' is 0"),
        ({"algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 300}, "run": {"max_steps": 300}}, "so the actor would never learn"),
        ({"algorithm": {"name": "ppo"}, "critic": {"num_labels": 2}}, "num_labels"),
        ({"algorithm": {"name": "ppo"}, "critic": {"shared": True, "warmup_steps": 3}}, "'critic.warmup_steps' is 3, which is not read: critic.shared is true"),
        ({"algorithm": {"name": "ppo"}, "critic": {"loss_coef": 0.5}}, "'critic.loss_coef' is 0.5, which is not read: critic.shared is false"),
    ],
)
def test_keys_of_ppo_that_make_no_sense_are_one_line(sections: dict[str, dict[str, object]], expected: str) -> None:
    with pytest.raises(UserError) as raised:
        recipe_of({"model": MODEL, "task": {"name": "sort"}, **sections})
    assert expected in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_defaults_of_ppo_are_the_published_ones() -> None:
    config = AlgorithmConfig(name="ppo", group_size=1)
    assert (config.gamma, config.gae_lambda, CriticConfig().value_clip) == (1.0, 1.0, 0.2)
