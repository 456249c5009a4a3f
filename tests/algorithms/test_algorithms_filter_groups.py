"""Dynamic sampling takes and drops groups as DAPO says, by rewards and order of dispatch alone."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.filter_groups import FilterGroupsConfig
from tandem.data.order import prompt_indices
from tandem.rl.rollout.filter_groups import GroupState, filter_metrics, group_state, groups_of, is_complete, trained_on
from tandem.types import FinishReason, Round, RunError, Sample, Score, ScoreState, UserError, WeightVersion

REWARD = FilterGroupsConfig()
ACCURACY = FilterGroupsConfig(metric="accuracy")


def sample(prompt: str, index: int, length: int = 3, finish_reason: FinishReason = FinishReason.STOP) -> Sample:
    zeros = (0.0,) * length
    return Sample(f"0/{prompt}/{index}", prompt, index, (1, 2), (5,) * length, zeros, zeros, (WeightVersion(0, 0),) * length, finish_reason, "x" * length)


def score(of: Sample, value: float | None, correct: bool | None = None) -> Score:
    return Score(of.id, ScoreState.INFRASTRUCTURE_FAULT if value is None else ScoreState.NUMBER, value, correct=correct)


def round_of(rewards: dict[str, list[float | None]], lengths: random.Random | None = None, correct: bool = True) -> Round:
    samples = [sample(prompt, i, lengths.randint(1, 500) if lengths else 3) for prompt, values in rewards.items() for i in range(len(values))]
    values = [value for group in rewards.values() for value in group]
    scores = [score(of, value, value == 1 if correct and value is not None else None) for of, value in zip(samples, values, strict=True)]
    return Round(samples, scores)


@pytest.mark.parametrize(
    ("rewards", "config", "state"),
    [
        ([1, 0, 0, 1], REWARD, GroupState.USEFUL),
        ([1, 1, 1, 1], REWARD, GroupState.ALL_RIGHT),
        ([0, 0, 0, 0], REWARD, GroupState.ALL_WRONG),
        ([0.5, 0.5, 0.5, 0.5], REWARD, GroupState.ALL_WRONG),
        ([0.5, 0.2, 0.5, 0.5], REWARD, GroupState.USEFUL),
        ([0.5, 0.2, 0.5, 0.5], ACCURACY, GroupState.ALL_WRONG),  # A penalty of length is no signal on what is right.
        ([1, 0.2, 0.5, 0.5], ACCURACY, GroupState.USEFUL),
        ([None, 1, None, None], REWARD, GroupState.FAULTY),
        ([None, None, None, None], REWARD, GroupState.FAULTY),
        ([None, 1, 1, None], REWARD, GroupState.ALL_RIGHT),
        ([None, 1, 0, None], REWARD, GroupState.USEFUL),
    ],
)
def test_group_is_useful_if_its_valid_rewards_differ(rewards: list[float | None], config: FilterGroupsConfig, state: GroupState) -> None:
    (group,) = groups_of([round_of({"a": rewards})])
    assert group_state(group, config) is state
    # verl's rule (recipe/dapo): a prompt is kept where np.std of its metric is above 0; its faults have no metric here.
    values = [value for value in rewards if value is not None]
    metric = values if config is REWARD else [float(value == 1) for value in values]
    assert (state is GroupState.USEFUL) == (len(values) > 1 and bool(np.std(metric) > 0))


def test_equal_rewards_of_which_nobody_says_what_is_right_are_neither() -> None:
    (group,) = groups_of([round_of({"a": [1, 1]}, correct=False)])
    assert group_state(group, REWARD) is GroupState.EQUAL
    with pytest.raises(RunError, match="metric' is 'accuracy', and no reward function says"):
        group_state(group, ACCURACY)


def test_aborted_sample_is_not_compared() -> None:
    one, two = sample("a", 0), sample("a", 1, finish_reason=FinishReason.ABORT)
    (group,) = groups_of([Round([one, two], [score(one, 1.0), score(two, 0.0)])])
    assert group_state(group, REWARD) is GroupState.FAULTY


def test_step_draws_until_it_has_its_groups_or_its_rounds_are_used_up() -> None:
    useful, empty = round_of({"a": [0, 1], "b": [1, 1]}), round_of({"c": [0, 0], "d": [1, 1]})
    more = round_of({"e": [1, 0], "f": [0, 1]})
    bounded = replace(REWARD, max_num_gen_batches=3)
    assert not is_complete([], None, 2) and is_complete([empty], None, 2), "without dynamic sampling a step has one round, whatever it brought"
    assert not is_complete([], bounded, 2) and not is_complete([useful], bounded, 2) and not is_complete([useful, empty], bounded, 2)
    assert is_complete([useful, more], bounded, 2) and is_complete([useful, empty, empty], bounded, 2)
    batch = trained_on([useful, empty, more], bounded, 2)
    assert [s.prompt_id for s in batch.samples] == ["a", "a", "e", "e"], "the surplus group f was dispatched last"
    assert [s.sample_id for s in batch.scores] == [s.id for s in batch.samples]
    assert trained_on([empty], replace(REWARD, max_num_gen_batches=1), 2) == Round([], [])
    assert trained_on([empty], None, 2) == empty


def test_metrics_count_every_group_that_was_drawn() -> None:
    rounds = [round_of({"a": [0, 1], "b": [1, 1], "c": [1, 1], "d": [0, 0]}), round_of({"e": [1, 0], "f": [0, 1], "g": [None, 1], "h": [0, 1]})]
    assert filter_metrics(rounds, REWARD, 3) == {
        "rollout/rounds": 2.0, "rollout/dropped_share": 4 / 8, "rollout/dropped_all_right_share": 2 / 8, "rollout/dropped_all_wrong_share": 1 / 8,
        "rollout/dropped_equal_share": 0.0, "rollout/dropped_faulty_share": 1 / 8, "rollout/surplus_share": 1 / 8,
    }  # fmt: skip


def test_selection_favours_neither_long_nor_short_completions() -> None:
    """Lengths, and with them the order in which groups finish, change nothing; what a step takes has the mean length of what it may take. A selection that
    takes the useful groups that finish first does not pass."""
    draws, seen, taken, first_finished = random.Random(3), list[int](), list[int](), list[int]()
    for trial in range(400):
        rounds, again = [], []
        for number in range(6):
            rewards = {f"{number}-{i}": [float(draws.random() < 0.4) for _ in range(4)] for i in range(5)}
            rounds.append(round_of(rewards, lengths=draws))
            longest_first = sorted(round_of(rewards, lengths=random.Random(trial)).scores, key=lambda s: draws.random())
            again.append(Round(round_of(rewards, lengths=random.Random(trial)).samples, longest_first))
        batch = trained_on(rounds, REWARD, 8)
        assert [s.id for s in batch.samples] == [s.id for s in trained_on(again, REWARD, 8).samples]
        taken += [len(s.token_ids) for s in batch.samples]
        useful = [group for group in groups_of(rounds) if group_state(group, REWARD) is GroupState.USEFUL]
        useful.sort(key=lambda group: max(len(s.token_ids) for s, _ in group))
        first_finished += [len(s.token_ids) for group in useful[:8] for s, _ in group]
        seen += [len(s.token_ids) for each in rounds for s in each.samples]
    # Lengths are uniform on 1 to 500 whatever the rewards: standard deviation 144.3, 12,800 samples taken.
    error = 4 * 144.3 / np.sqrt(len(taken))
    assert abs(np.mean(taken) - 250.5) < error and len(taken) == 400 * 8 * 4
    assert abs(np.mean(first_finished) - 250.5) > error
    assert abs(np.mean(seen) - 250.5) < 4 * 144.3 / np.sqrt(len(seen))


@pytest.mark.parametrize("size", [12, 13, 30])
def test_rounds_of_a_step_never_draw_a_prompt_twice_also_across_an_epoch(size: int) -> None:
    for first in range(40):
        taken: list[int] = []
        for draw in range(first, first + 3):
            chosen = prompt_indices(draw, 4, 7, size, taken)
            assert len(chosen) == 4 and not set(chosen) & set(taken)
            taken += chosen
    assert [prompt_indices(draw, 4, 7, size) for draw in range(9)] == [prompt_indices(draw, 4, 7, size, {99}) for draw in range(9)]


@pytest.mark.parametrize(
    ("config", "named"),
    [(FilterGroupsConfig(max_num_gen_batches=0), "max_num_gen_batches' is 0"), (FilterGroupsConfig(gen_batch_size=-1), "gen_batch_size' is -1")],
)
def test_a_filter_that_cannot_work_is_refused(config: FilterGroupsConfig, named: str) -> None:
    with pytest.raises(UserError, match=named):
        config.check()
    assert AlgorithmConfig(filter_groups=FilterGroupsConfig(gen_batch_size=6)).prompts_per_round(4) == 6
