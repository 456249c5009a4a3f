"""The advantages that pages show are those that the trainer computes."""

import random

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig, AlgorithmName
from tandem.report.advantages import sample_advantages
from tandem.rl.algorithms.batch import group_advantages
from tandem.types import FinishReason, Sample, Score, ScoreState


def scored(rewards: list[list[float | None]]) -> tuple[list[Sample], dict[str, Score]]:
    samples, scores = [], {}
    for prompt, group in enumerate(rewards):
        for index, reward in enumerate(group):
            name = f"0/p{prompt}/{index}"
            samples.append(Sample(name, f"p{prompt}", index, (1,), (2,), (0.0,), (0.0,), (None,), FinishReason.STOP, ""))
            state = ScoreState.INFRASTRUCTURE_FAULT if reward is None else ScoreState.NUMBER
            scores[name] = Score(name, state, reward)
    return samples, scores


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_those_of_the_trainer(name: AlgorithmName) -> None:
    rng = random.Random(3)
    rewards: list[list[float | None]] = [[rng.choice((0.0, 1.0, 0.25, None)) for _ in range(6)] for _ in range(40)]
    rewards += [[1.0] * 6, [0.1] * 6, [None] * 6, [1.0, *[None] * 5]]
    config = AlgorithmConfig(name=name)
    found = sample_advantages(config, *scored(rewards))
    valid = torch.tensor([[reward is not None for reward in group] for group in rewards])
    values = torch.tensor([[reward or 0.0 for reward in group] for group in rewards], dtype=torch.float64)
    expected = group_advantages(config, values, valid)
    for prompt, group in enumerate(rewards):
        usable = sum(reward is not None for reward in group) >= 2
        for index, reward in enumerate(group):
            shown = found.get(f"0/p{prompt}/{index}")
            assert (shown is not None) == (reward is not None and usable)
            assert (shown or 0.0) == pytest.approx(float(expected[prompt, index]), abs=1e-12)


def test_advantages_that_depend_on_more_than_a_group_are_left_out() -> None:
    samples = scored([[0.0, 1.0]])
    for config in (None, AlgorithmConfig(name="ppo"), AlgorithmConfig(name="reinforce_plus_plus"), AlgorithmConfig(kl_in_reward=True, kl_coef=0.1)):
        assert sample_advantages(config, *samples) == {}
