"""Group advantages against cases worked by hand."""

import math
from dataclasses import replace

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.dr_grpo import dr_grpo_advantages
from tandem.rl.algorithms.groups import usable, zero_std
from tandem.rl.algorithms.grpo import grpo_advantages
from tandem.rl.algorithms.rloo import rloo_advantages
from tandem.rl.step_metrics import sample_metrics, staleness
from tandem.types import FinishReason, Sample, Score, ScoreState, WeightVersion

ALL = torch.ones(1, 4, dtype=torch.bool)


def rewards(*groups):
    return torch.tensor(groups, dtype=torch.float64)


def test_grpo_advantages_equal_the_case_worked_by_hand():
    # Rewards 1, 0, 0, 1: mean 1/2; squared deviations sum to 4/4 = 1; sample variance 1/3; std 1/sqrt(3).
    # (1 - 1/2) / (1/sqrt(3)) = sqrt(3)/2.
    half = math.sqrt(3) / 2
    found = grpo_advantages(rewards([1, 0, 0, 1]), ALL, epsilon=0.0)
    torch.testing.assert_close(found, rewards([half, -half, -half, half]), rtol=1e-15, atol=0)


def test_grpo_epsilon_is_added_to_the_standard_deviation():
    # Rewards 0, 2: mean 1, sample variance 2, std sqrt(2); with epsilon 0.5: 1 / (sqrt(2) + 0.5).
    found = grpo_advantages(rewards([0, 2]), ALL[:, :2], epsilon=0.5)
    torch.testing.assert_close(found[0, 1].item(), 1 / (math.sqrt(2) + 0.5), rtol=1e-15, atol=0)


def test_dr_grpo_advantages_are_not_divided_by_the_standard_deviation():
    # Rewards 3, 1, 0, 0: mean 1.
    assert dr_grpo_advantages(rewards([3, 1, 0, 0]), ALL).tolist() == [[2.0, 0.0, -1.0, -1.0]]


def test_rloo_advantages_are_taken_against_the_mean_of_the_others():
    # Rewards 3, 1, 0, 0: 3 - 1/3, 1 - 3/3, 0 - 4/3, 0 - 4/3.
    found = rloo_advantages(rewards([3, 1, 0, 0]), ALL)
    torch.testing.assert_close(found, rewards([8 / 3, 0, -4 / 3, -4 / 3]), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_masked_sample_touches_nothing_whatever_its_reward_holds(advantage):
    of = {
        "grpo": lambda r, v: grpo_advantages(r, v, 1e-6),
        "dr_grpo": dr_grpo_advantages,
        "rloo": rloo_advantages,
    }[advantage]
    alone = of(rewards([1, 0, 5]), torch.ones(1, 3, dtype=torch.bool))
    beside = of(rewards([1, math.nan, 0, 5]), torch.tensor([[True, False, True, True]]))
    assert beside[0, 1] == 0
    assert torch.equal(beside[:, [0, 2, 3]], alone)


@pytest.mark.parametrize("valid", [[False, False, False], [False, True, False]])
def test_a_group_with_fewer_than_two_valid_samples_has_no_advantage_and_is_masked(valid):
    valid = torch.tensor([valid])
    values = rewards([4, 7, 1])
    for found in (
        grpo_advantages(values, valid, 1e-6),
        dr_grpo_advantages(values, valid),
        rloo_advantages(values, valid),
    ):
        assert found.tolist() == [[0, 0, 0]]
    assert not usable(valid).any()


def test_equal_rewards_have_exactly_no_advantage_even_where_their_mean_is_rounded():
    values, valid = rewards([0.1, 0.1, 0.1]), torch.ones(1, 3, dtype=torch.bool)
    assert grpo_advantages(values, valid, epsilon=0.0).tolist() == [[0, 0, 0]]
    assert zero_std(values, valid).tolist() == [True]


def test_groups_do_not_see_each_other():
    both = rewards([1, 0, 0, 1], [100, -7, 3, 3])
    valid = torch.ones(2, 4, dtype=torch.bool)
    for of in (lambda r, v: grpo_advantages(r, v, 1e-6), dr_grpo_advantages, rloo_advantages):
        assert torch.equal(of(both, valid)[1:], of(both[1:], valid[1:]))


def sample(prompt, index, reason=FinishReason.STOP, tokens=(7, 8)):
    logprobs = tuple(-0.5 - i for i in range(len(tokens)))
    return Sample(
        f"0/{prompt}/{index}",
        prompt,
        index,
        (1, 2, 3),
        tokens,
        logprobs,
        logprobs,
        (WeightVersion(0, 4),) * len(tokens),
        reason,
        "",
    )


def score(of, value):
    state = ScoreState.INFRASTRUCTURE_FAULT if value is None else ScoreState.NUMBER
    return Score(of.id, state, value)


def test_a_batch_compares_within_prompts_and_masks_what_has_no_reward():
    samples = [sample("a", 0), sample("a", 1), sample("a", 2), sample("b", 0), sample("b", 1), sample("b", 2)]
    values = [1.0, None, 0.0, 1.0, None, None]
    config = AlgorithmConfig(group_size=3, name="dr_grpo")
    scores = [score(s, v) for s, v in zip(samples, values, strict=True)]
    batch = make_batch(5, samples, list(reversed(scores)), config, max_tokens=32)
    # Group a: rewards 1 and 0 count, mean 1/2. Group b has one reward left, which cannot be compared.
    assert [s.loss_mask for s in batch.sequences] == [
        (0, 0, 0, 1, 1), (0,) * 5, (0, 0, 0, 1, 1), (0,) * 5, (0,) * 5, (0,) * 5,
    ]  # fmt: skip
    assert [s.advantages[-1] for s in batch.sequences] == [0.5, 0, -0.5, 0, 0, 0]
    assert batch.sequences[0].rollout_logprobs == (0, 0, 0, -0.5, -1.5)
    assert (batch.step, batch.length_constant, batch.mask_tokens) == (5, 32, 4.0)
    assert batch.sequences[0].weight_step == 4


def test_a_truncated_sample_is_compared_with_but_not_trained_on_where_that_is_asked_for():
    samples = [sample("a", 0), sample("a", 1, FinishReason.LENGTH)]
    scores = [score(samples[0], 1.0), score(samples[1], 0.0)]
    for asked in (False, True):
        batch = make_batch(0, samples, scores, AlgorithmConfig(name="dr_grpo", mask_truncated=asked), 32)
        assert batch.sequences[0].advantages[-1] == 0.5
        assert sum(batch.sequences[1].loss_mask) == (0 if asked else 2)


def test_the_observations_of_an_episode_are_in_no_loss_and_no_length():
    at = WeightVersion(0, 4)
    episode = replace(sample("a", 0, tokens=(7, 8, 9, 10)), weight_versions=(at, None, None, at), response_mask=(True, False, False, True))
    other = sample("a", 1)
    scores = [score(episode, 1.0), score(other, 0.0)]
    batch = make_batch(0, [episode, other], scores, AlgorithmConfig(name="dr_grpo"), 32)
    assert batch.sequences[0].loss_mask == (0, 0, 0, 1, 0, 0, 1)
    assert batch.sequences[0].advantages == (0, 0, 0, 0.5, 0, 0, 0.5)
    assert batch.mask_tokens == 4 and batch.sequences[0].weight_step == 4
    row = sample_metrics([episode, other], scores)
    assert row["response_length/mean"] == row["response_length/max"] == 2
    assert staleness([episode, other], 5) == 1


def test_an_aborted_sample_is_masked_and_leaves_the_statistics():
    samples = [sample("a", 0), sample("a", 1), sample("a", 2, FinishReason.ABORT)]
    scores = [score(samples[0], 1.0), score(samples[1], 0.0), score(samples[2], 100.0)]
    batch = make_batch(0, samples, scores, AlgorithmConfig(name="dr_grpo"), 32)
    assert [s.advantages[-1] for s in batch.sequences] == [0.5, -0.5, 0]
    assert sum(batch.sequences[2].loss_mask) == 0
