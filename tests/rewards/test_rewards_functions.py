import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.config.rewards import RewardFunctionConfig
from tandem.rl.rewards.functions import call_trl, call_verl, detect_signature, user_judge
from tandem.rl.rewards.judgement import Item, JudgeCall, Judgement
from tandem.runtime.import_path import load_function
from tandem.types import ScoreState, UserError


def items(*completions: str) -> list[Item]:
    return [
        Item(f"0/p{i}/0", f"prompt {i}", text, (i, i + 1), f"truth {i}", "dataset", {"level": i, "data_source": "school"})
        for i, text in enumerate(completions)
    ]


async def waited(result: Any) -> list[Judgement]:
    judgements: list[Judgement] = await result
    return judgements


def values(judgements: Sequence[Judgement]) -> list[float | None]:
    return [judgement.value for judgement in judgements]


def test_a_trl_function_receives_prompts_completions_ids_and_columns_as_lists() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        assert columns.pop("trainer_state").global_step == 0
        assert callable(columns.pop("log_extra")) and callable(columns.pop("log_metric"))
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [float(len(text)) for text in completions]

    assert values(call_trl(reward, items("a", "bb"), {"extra": 3})) == [1.0, 2.0]
    assert seen == {
        "prompts": ["prompt 0", "prompt 1"], "completions": ["a", "bb"], "completion_ids": [[0, 1], [1, 2]],
        "level": [0, 1], "data_source": ["school", "school"], "ground_truth": ["truth 0", "truth 1"], "extra": 3,
    }  # fmt: skip


def test_a_trl_function_without_keyword_arguments_receives_only_what_it_names() -> None:
    assert values(call_trl(lambda completions, level: level, items("a", "b"), {})) == [0.0, 1.0]


def test_an_async_trl_function_is_awaited() -> None:
    async def reward(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    assert values(asyncio.run(waited(call_trl(reward, items("a", "b"), {})))) == [1.0, 1.0]


def test_a_verl_function_receives_its_four_arguments() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        assert (data_source, solution_str, ground_truth) == ("school", "a", "truth 0")
        assert extra_info == {"level": 0, "data_source": "school"}
        return {"score": 0.5, "acc": True, "length": 1, "note": "kept", "broken": float("nan")}

    (judgement,) = call_verl(compute_score, items("a"), {})
    assert (judgement.value, judgement.correct, judgement.details) == (0.5, True, {"length": 1.0})
    assert judgement.extra == {"note": "kept", "broken": "nan"}


def test_verls_own_extra_info_column_is_handed_on() -> None:
    item = items("a")[0]._replace(columns={"extra_info": {"index": 7}})

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(extra_info["index"])

    assert values(call_verl(compute_score, [item], {})) == [7.0]


class Scalar:
    """Returns scores as numpy and torch scalars."""

    def __float__(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "it returned nan"),
        (float("inf"), "it returned inf"),
        (10**400, "which is not a number"),
        ("1.0", "str '1.0' instead of a number"),
        ([1.0], "list [1.0] instead of a number"),
        (1 + 2j, "complex"),
    ],
)
def test_a_value_that_is_no_finite_number_is_that_samples_fault_and_no_reward(value: Any, problem: str) -> None:
    good, bad = call_trl(lambda completions: [1.0, value], items("a", "b"), {})
    assert good.value == 1.0
    assert (bad.state, bad.value) == (ScoreState.INFRASTRUCTURE_FAULT, None)
    assert problem in bad.reason
    assert call_verl(lambda solution_str: value, items("a"), {})[0].state is ScoreState.INFRASTRUCTURE_FAULT


def test_integers_booleans_and_scalars_of_other_libraries_are_numbers() -> None:
    assert values(call_trl(lambda completions: (1, True, Scalar()), items("a", "b", "c"), {})) == [1.0, 1.0, 0.25]


@pytest.mark.parametrize("result", [[1.0], [1.0] * 3, 1.0, "ab", {"a": 1, "b": 2}, None])
def test_a_trl_result_of_another_length_or_type_raises(result: Any) -> None:
    with pytest.raises(ValueError, match="it returned"):
        call_trl(lambda completions: result, items("a", "b"), {})


def test_a_verl_dict_without_score_is_a_fault() -> None:
    (judgement,) = call_verl(lambda solution_str: {"reward": 1.0}, items("a"), {})
    assert judgement.state is ScoreState.INFRASTRUCTURE_FAULT
    assert "without 'score'" in judgement.reason


def test_the_signature_follows_from_the_parameters_names() -> None:
    assert detect_signature(lambda prompts, completions, **kwargs: [], "m:f") == "trl"
    assert detect_signature(lambda completions, **kwargs: [], "m:f") == "trl"
    assert detect_signature(lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, "m:f") == "verl"
    with pytest.raises(UserError, match=r"parameters \(args, sample\).*signature: trl"):
        detect_signature(lambda args, sample: 0.0, "m:f")


def test_a_signature_can_be_said_instead(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(**everything):\n    return [1.0 for _ in everything['completions']]\n")
    judge = user_judge(RewardFunctionConfig(f"{tmp_path}/mine.py:reward", signature="trl"))
    assert judge.batched
    assert values(judge.judge(items("a"), JudgeCall())) == [1.0]


def test_a_file_can_import_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 3.0\n")
    (tmp_path / "mine.py").write_text("from beside_it import VALUE\ndef f(completions):\n    return [VALUE]\n")
    assert load_function(f"{tmp_path}/mine.py:f", "reward function")[0](["a"]) == [3.0]
    sys.modules.pop("beside_it")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module_here:f", "cannot be loaded: ModuleNotFoundError"),
        ("json:no_such_function", "has no 'no_such_function'; it has dump, dumps"),
        ("math:pi", "cannot be called"),
        ("no/such/file.py:f", "'no/such/file.py' does not exist"),
    ],
)
def test_a_wrong_path_is_one_clear_line(path: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        load_function(path, "reward function")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["raise ValueError('at import')", "import sys; sys.exit(3)", "def f(:"])
def test_a_file_that_cannot_be_imported_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_function(f"{tmp_path}/broken.py:f", "reward function")


def test_an_argument_that_the_function_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completions, width=1):\n    return [width for _ in completions]\n")
    judge = user_judge(RewardFunctionConfig(f"{tmp_path}/mine.py:f", arguments={"width": 2}))
    assert values(judge.judge(items("a"), JudgeCall())) == [2.0]
    with pytest.raises(UserError, match="'widht', which is not a parameter of it; its parameters are completions, width"):
        user_judge(RewardFunctionConfig(f"{tmp_path}/mine.py:f", arguments={"widht": 2}))
