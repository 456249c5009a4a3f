from typing import Any

import pytest

from tandem.config.load import build
from tandem.config.rewards import FormatCheckerConfig, RewardFunctionConfig, RewardsConfig
from tandem.rl.rewards.judgement import infrastructure_fault, model_fault, number
from tandem.rl.rewards.pool import check_fault_share
from tandem.rl.rewards.rule_based import compose
from tandem.types import RunError, Score, ScoreState, UserError

TWO = RewardsConfig(
    functions=(
        RewardFunctionConfig("answer_matcher", name="answer", weight=1.0),
        RewardFunctionConfig("format_checker", name="form", weight=0.25, format=FormatCheckerConfig(tags=("answer",))),
    )
)


def test_the_reward_is_the_weighted_sum_and_the_first_function_says_what_is_correct() -> None:
    score = compose("s", {"answer": number(1.0), "form": number(0.0)}, TWO)
    assert (score.state, score.value, score.correct) == (ScoreState.NUMBER, 1.0, True)
    score = compose("s", {"answer": number(0.0), "form": number(1.0)}, TWO)
    assert (score.value, score.correct, score.components) == (0.25, False, {"answer": 0.0, "form": 1.0})


def test_another_function_can_be_the_one_that_says_what_is_correct() -> None:
    config = RewardsConfig(functions=TWO.functions, accuracy="form", accuracy_threshold=0.5)
    assert compose("s", {"answer": number(0.0), "form": number(0.5)}, config).correct is True
    assert compose("s", {"answer": number(1.0), "form": number(0.4)}, config).correct is False


def test_a_functions_own_word_on_correctness_goes_before_the_threshold() -> None:
    assert compose("s", {"answer": number(0.1, correct=True), "form": number(0.0)}, TWO).correct is True


def test_one_infrastructure_fault_masks_the_sample_and_keeps_what_the_others_said() -> None:
    score = compose("s", {"answer": number(1.0), "form": infrastructure_fault("gone")}, TWO)
    assert (score.state, score.value, score.correct) == (ScoreState.INFRASTRUCTURE_FAULT, None, None)
    assert (score.components, score.reason) == ({"answer": 1.0}, "gone")


def test_a_model_fault_keeps_its_value_in_the_sum() -> None:
    score = compose("s", {"answer": model_fault(-1.0, "no answer"), "form": number(1.0)}, TWO)
    assert (score.state, score.value, score.correct) == (ScoreState.MODEL_FAULT, -0.75, False)


def test_a_judges_details_stand_under_its_name() -> None:
    score = compose("s", {"answer": number(1.0, details={"length": 3.0}), "form": number(0.0)}, TWO)
    assert score.components == {"answer": 1.0, "answer/length": 3.0, "form": 0.0}


def scores(good: int, bad: int) -> list[Score]:
    fault = "reward function 'f' on sample 's': it raised ValueError"
    return [Score(f"g{i}", ScoreState.NUMBER, 0.0) for i in range(good)] + [
        Score(f"b{i}", ScoreState.INFRASTRUCTURE_FAULT, None, reason=fault) for i in range(bad)
    ]


def test_faults_up_to_the_share_go_on_and_past_it_the_run_stops_with_one_line() -> None:
    config = RewardsConfig(max_fault_share=0.25)
    check_fault_share(scores(6, 2), config)
    with pytest.raises(RunError) as error:
        check_fault_share(scores(5, 3), config)
    text = str(error.value)
    assert "3 of 8 samples" in text
    assert "max_fault_share (0.25)" in text
    assert "reward function 'f'" in text
    assert "\n" not in text
    assert error.value.exit_code == 1


def test_without_faults_a_share_of_zero_goes_on() -> None:
    check_fault_share(scores(3, 0), RewardsConfig(max_fault_share=0.0))
    with pytest.raises(RunError):
        check_fault_share(scores(99, 1), RewardsConfig(max_fault_share=0.0))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"workers": 0}, "'rewards.workers' is 0"),
        ({"max_fault_share": 1.5}, "'rewards.max_fault_share' is 1.5"),
        ({"deadline_s": 1, "sample_deadline_s": 2}, "more than rewards.deadline_s"),
        ({"functions": [{"function": "anser_matcher"}]}, "reward function 'anser_matcher' is neither one of"),
        ({"functions": [{"function": "a:f"}, {"function": "b:f"}]}, "two reward functions are named 'f'"),
        ({"functions": [{"function": "a:f"}], "accuracy": "g"}, "'rewards.accuracy' is 'g'"),
        ({"functions": [{"function": "format_checker"}]}, "needs a section 'format'"),
        ({"functions": [{"function": "format_checker", "format": {}}]}, "needs one of pattern, tags, json_schema and scripts"),
        ({"functions": [{"function": "format_checker", "format": {"pattern": "("}}]}, "not a valid regular expression"),
        ({"functions": [{"function": "task", "arguments": {"a": 1}}]}, "belong to functions of your own"),
        ({"functions": [{"function": "a:f", "answer": {"extract": "boxed"}}]}, "belongs to answer_matcher"),
        ({"functions": [{"function": "task", "answer": {"tolerance": 0.1}}]}, "use numeric"),
        ({"functions": [{"function": "task", "answer": {"extract": "box"}}]}, "did you mean 'boxed'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        build(RewardsConfig, data, "rewards")
    assert problem in str(error.value)
