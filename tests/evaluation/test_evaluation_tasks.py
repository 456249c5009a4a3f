import json
import math
from collections.abc import Sequence

import pytest

from tandem.config.evaluation import EvaluationConfig
from tandem.config.load import build
from tandem.evaluation.tasks import EvaluationResult, evaluate
from tandem.types import FinishReason, Prompt, RunError, Sample, Score, ScoreState, UserError, WeightVersion

AT = WeightVersion(0, 0)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"question {i}", (1,), str(i)) for i in range(count)]


def generate(chosen: Sequence[Prompt], n: int = 1) -> list[Sample]:
    return [
        Sample(f"0/{p.id}/{k}", p.id, k, (1,), (2,), (0.0,), (0.0,), (AT,), FinishReason.STOP, f"{p.id} {k}")
        for p in chosen
        for k in range(n)
    ]


def test_accuracy_and_its_standard_error_equal_the_closed_form() -> None:
    def judge(samples: Sequence[Sample], _: Sequence[Prompt]) -> list[Score]:
        return [Score(s.id, ScoreState.NUMBER, 0.5, correct=i % 4 != 0) for i, s in enumerate(samples)]

    result = evaluate(generate, prompts(100), judge)
    assert result.accuracy == 0.75
    assert math.isclose(result.standard_error, math.sqrt(0.75 * 0.25 / 99))
    assert (result.count, result.samples, result.faults, result.mean_reward) == (100, 100, 0, 0.5)


def test_several_samples_of_a_prompt_are_one_draw_for_the_standard_error() -> None:
    def judge(samples: Sequence[Sample], _: Sequence[Prompt]) -> list[Score]:
        return [Score(s.id, ScoreState.NUMBER, 1.0, correct=s.prompt_id in ("p0", "p1")) for s in samples]

    result = evaluate(lambda chosen: generate(chosen, 4), prompts(4), judge)
    assert result.accuracy == 0.5
    assert math.isclose(result.standard_error, math.sqrt((4 * 0.25 / 3) / 4))
    assert (result.count, result.samples) == (4, 16)


def test_a_sample_that_could_not_be_judged_counts_nowhere() -> None:
    def judge(samples: Sequence[Sample], _: Sequence[Prompt]) -> list[Score]:
        fault = Score(samples[0].id, ScoreState.INFRASTRUCTURE_FAULT, None, reason="gone")
        return [fault, *(Score(s.id, ScoreState.NUMBER, 1.0, correct=True) for s in samples[1:])]

    result = evaluate(generate, prompts(5), judge)
    assert (result.accuracy, result.count, result.faults, result.mean_reward) == (1.0, 4, 1, 1.0)


def test_an_evaluation_that_nobody_could_judge_is_no_zero() -> None:
    def broken(samples: Sequence[Sample], _: Sequence[Prompt]) -> list[Score]:
        return [Score(s.id, ScoreState.INFRASTRUCTURE_FAULT, None, reason="the judge is gone") for s in samples]

    def silent(samples: Sequence[Sample], _: Sequence[Prompt]) -> list[Score]:
        return [Score(s.id, ScoreState.NUMBER, 1.0) for s in samples]

    with pytest.raises(RunError, match=r"none of 3 samples.*the judge is gone"):
        evaluate(generate, prompts(3), broken)
    with pytest.raises(RunError, match=r"'rewards.accuracy'"):
        evaluate(generate, prompts(3), silent)
    with pytest.raises(RunError, match="no prompts"):
        evaluate(generate, [], silent)


def test_examples_are_of_the_first_prompts_and_survive_the_way_through_json() -> None:
    def judge(samples: Sequence[Sample], _: Sequence[Prompt]) -> list[Score]:
        return [Score(s.id, ScoreState.NUMBER, 1.0, correct=True) for s in samples]

    result = evaluate(lambda chosen: generate(chosen, 2), prompts(5), judge, examples=2)
    assert [(e.prompt, e.completion, e.ground_truth) for e in result.examples] == [
        ("question 0", "p0 0", "0"),
        ("question 1", "p1 0", "1"),
    ]
    assert EvaluationResult.from_json(json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.parametrize(("key", "value"), [("every_steps", 0), ("prompts", 0), ("target_accuracy", 1.1), ("examples", -1)])
def test_a_setting_out_of_range_is_refused_with_its_name(key: str, value: float) -> None:
    with pytest.raises(UserError, match=f"'evaluation.{key}' is {value}"):
        build(EvaluationConfig, {key: value}, "evaluation")
