import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tandem.config.rewards import AnswerMatcherConfig, FormatCheckerConfig, RewardFunctionConfig, RewardsConfig
from tandem.rl.rewards.answer_matcher import check_installed, last_boxed, last_number, match_answer, numeric_value
from tandem.rl.rewards.format_checker import format_checker
from tandem.rl.rewards.judgement import Item, Judgement
from tandem.rl.rewards.pool import RewardPool
from tandem.types import FinishReason, Prompt, Sample, ScoreState, UserError, WeightVersion


def judged(completion: str, truth: Any, fault_value: float = 0.0, **settings: Any) -> Judgement:
    return match_answer(completion, truth, AnswerMatcherConfig(**settings), fault_value)


@pytest.mark.parametrize(
    ("completion", "truth", "settings", "value"),
    [
        (" 1 2 3\n", "1 2 3", {}, 1.0),
        ("1 2 3 4", "1 2 3", {}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("42", 42, {}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
        ("Ünïcode ✓", "Ünïcode ✓", {}, 1.0),
        ("1,000.0", "1e3", {"compare": "numeric"}, 1.0),
        ("3/4", 0.75, {"compare": "numeric"}, 1.0),
        ("50%", "0.5", {"compare": "numeric"}, 1.0),
        ("$12.", "12", {"compare": "numeric"}, 1.0),
        ("0.3333", "1/3", {"compare": "numeric"}, 0.0),
        ("0.3333", "1/3", {"compare": "numeric", "tolerance": 1e-3}, 1.0),
        ("-7", "7", {"compare": "numeric"}, 0.0),
        ("9007199254740993", "9007199254740992", {"compare": "numeric"}, 0.0),
        ("so 3 and 4, that is 1,234 in all.", "1234", {"extract": "last_number", "compare": "numeric"}, 1.0),
        ("it is 12, not 13", "12", {"extract": "last_number", "compare": "numeric"}, 0.0),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}", {"extract": "boxed"}, 1.0),
        ("work #### 17\n#### 18", "18", {"after": "####"}, 1.0),
    ],
)
def test_a_case_worked_by_hand(completion: str, truth: Any, settings: dict[str, Any], value: float) -> None:
    judgement = judged(completion, truth, **settings)
    assert (judgement.state, judgement.value, judgement.correct) == (ScoreState.NUMBER, value, value == 1.0)


@pytest.mark.parametrize(
    ("completion", "settings"),
    [
        ("", {}),
        (" \n", {}),
        ("no digits here", {"extract": "last_number"}),
        ("boxed{1}", {"extract": "boxed"}),
        (r"\boxed{never closed", {"extract": "boxed"}),
        ("seven", {"compare": "numeric"}),
        ("1/0", {"compare": "numeric"}),
        ("9" * 5000, {"compare": "numeric"}),
        ("7", {"after": "####"}),
    ],
)
def test_a_completion_with_nothing_to_compare_is_the_models_fault_and_has_the_asked_value(
    completion: str, settings: dict[str, Any]
) -> None:
    judgement = judged(completion, "7", fault_value=-0.5, **settings)
    assert (judgement.state, judgement.value, judgement.correct) == (ScoreState.MODEL_FAULT, -0.5, False)
    assert judgement.reason


@pytest.mark.parametrize(("truth", "settings"), [(None, {}), ({"a": 1}, {}), ([], {}), (True, {}), ("seven", {"compare": "numeric"})])
def test_a_ground_truth_that_cannot_be_compared_is_never_a_reward(truth: Any, settings: dict[str, Any]) -> None:
    judgement = judged("7", truth, **settings)
    assert (judgement.state, judgement.value) == (ScoreState.INFRASTRUCTURE_FAULT, None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 1 b 22 c", "22"),
        ("x = -3.5!", "-3.5"),
        ("1,234,567.", "1,234,567"),
        ("about 2e-3 m", "2e-3"),
        ("so 3/4.", "3/4"),
        ("v1.2.3", None),
        (".5", ".5"),
        ("none", None),
        ("5.", "5"),
    ],
)
def test_the_last_number_is_found_as_it_stands(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_a_number_at_the_end_of_random_text_is_the_last_number() -> None:
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choice("ab .,;:()\n 0123456789-+") for _ in range(draw.randrange(30)))
        number = str(draw.randrange(-999, 1000)) + draw.choice(["", ".25", "e3"])
        assert last_number(f"{text} = {number}") == number


def test_numeric_value_equals_pythons_own_reading() -> None:
    draw = random.Random(2)
    for _ in range(500):
        value = draw.uniform(-1e6, 1e6)
        for text in (repr(value), f"{value:.3f}", f"{value:,.2f}", f"{value:e}"):
            assert numeric_value(text) == Fraction(text.replace(",", ""))


def test_matched_braces_inside_a_box_belong_to_it() -> None:
    assert last_boxed(r"\boxed{a{b{c}}d} }") == "a{b{c}}d"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"


def test_math_verify_is_refused_with_the_fix_where_it_is_not_installed() -> None:
    config = AnswerMatcherConfig(compare="math_verify")
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"pip install 'tandem-rl\[math\]'"):
            check_installed(config)
    else:
        assert judged(r"\frac{2}{4}", r"\frac{1}{2}", compare="math_verify").value == 1.0


MATH = [
    ("0.5", r"\frac{1}{2}", {}, 1.0), (r"so it is $\frac12$", "1/2", {}, 1.0), ("1,234.50", "1234.5", {}, 1.0),
    ("2.5e3", "2500", {}, 0.0), ("-7", "7", {}, 0.0),
    ("28 percent", r"$28\%$", {}, 1.0), ("28", r"$28\%$", {}, 1.0), ("0.28", "28", {}, 0.0),
    (r"The answer is $12\text{ cm}^2$.", "12", {}, 1.0), (r"\boxed{3\ \text{meters}}", "3", {}, 1.0),
    (r"$\{3, 1, 2\}$", r"$\{1,2,3\}$", {}, 1.0), (r"$\{1, 2\}$", r"$\{1,2,3\}$", {}, 0.0), (r"$[0, 1)$", r"$[0,1)$", {}, 1.0),
    (r"$(0, 1)$", r"$[0,1)$", {}, 0.0),
    (r"$(-\infty, 2) \cup (3, \infty)$", r"$(3,\infty)\cup(-\infty,2)$", {}, 1.0),
    (r"$x^2 + 2x + 1$", r"$(x+1)^2$", {}, 1.0), (r"$x = 4$", "4", {}, 1.0), (r"$\sqrt{8}$", r"$2\sqrt{2}$", {}, 1.0),
    (r"$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$", r"$\begin{pmatrix} 1&2\\3&4 \end{pmatrix}$", {}, 1.0),
    ("0.3333", r"$\frac13$", {}, 0.0), ("0.3333", r"$\frac13$", {"precision": 4}, 1.0),
    (r"$1 < x < 2$", r"$(1, 2)$", {}, 0.0), (r"$1 < x < 2$", r"$x \in (1, 2)$", {"relation_is_set": True}, 1.0),
    ("The answer is (C).", "C", {}, 1.0), (r"\boxed{B}", "(C)", {}, 0.0), ("C. because it is", "C", {}, 1.0), ("C", ["B", "C"], {}, 1.0),
    ("Perhaps.", "C", {}, -0.5), ("  ", "7", {}, -0.5),
]  # fmt: skip
"""Completion, ground truth, settings and reward; a completion with nothing to compare has the value of a model fault, -0.5."""


@pytest.mark.parametrize(("completion", "truth", "settings", "value"), MATH, ids=range(len(MATH)))
def test_answers_are_compared_by_their_value_with_math_verify(completion: str, truth: Any, settings: dict[str, Any], value: float) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed, so it is not tested")
    assert judged(completion, truth, -0.5, compare="math_verify", **settings).value == value


@pytest.mark.full
def test_an_endless_comparison_is_masked_and_the_log_names_sample_and_function(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed, so it is not tested")
    function = RewardFunctionConfig("answer_matcher", name="math", answer=AnswerMatcherConfig(compare="math_verify"))
    texts = ("7", "$123456789!$", "8")
    at = WeightVersion(0, 0)
    samples = [Sample(f"3/p{i}/0", f"p{i}", 0, (1,), (2,), (0.0,), (0.0,), (at,), FinishReason.STOP, text) for i, text in enumerate(texts)]
    with RewardPool(RewardsConfig(functions=(function,), sample_deadline_s=8.0, deadline_s=100.0), log_dir=tmp_path) as pool:
        scores = pool.score(samples, [Prompt(f"p{i}", "?", (1,), "7", "dataset") for i in range(3)])
    assert [score.value for score in scores] == [1.0, None, 0.0]
    assert "reward function 'math' on sample '3/p1/0': no answer within 8 s, and its process was ended" in scores[1].reason
    assert "it hung and was ended, in reward function 'math' on sample '3/p1/0'" in caplog.text


def formed(text: str, **settings: Any) -> float | None:
    item = Item("s", "p", text, (), None, "t", {})
    return format_checker(FormatCheckerConfig(**settings))(item).value


@pytest.mark.parametrize(
    ("text", "settings", "value"),
    [
        ("<think>a\nb</think> <answer>1</answer>\n", {"tags": ("think", "answer")}, 1.0),
        ("<think>a</think> so <answer>1</answer>", {"tags": ("think", "answer")}, 0.0),
        ("<think>a</think> so <answer>1</answer>.", {"tags": ("think", "answer"), "match": "contains"}, 1.0),
        ("<answer>1</answer><think>a</think>", {"tags": ("think", "answer"), "match": "contains"}, 0.0),
        ("<think><answer>1</answer></think>", {"tags": ("think", "answer"), "match": "contains"}, 0.0),
        ("<think>a</think><think>b</think><answer>1</answer>", {"tags": ("think", "answer")}, 0.0),
        ("<answer>1", {"tags": ("answer",)}, 0.0),
        ("</answer><answer>", {"tags": ("answer",)}, 0.0),
        ("Answer: 12", {"pattern": r"Answer: \d+"}, 1.0),
        ("Well. Answer: 12", {"pattern": r"Answer: \d+"}, 0.0),
        ("Well. Answer: 12", {"pattern": r"Answer: \d+", "match": "contains"}, 1.0),
        ("a\nb", {"pattern": "a.b"}, 1.0),
    ],
)
def test_a_form_worked_by_hand(text: str, settings: dict[str, Any], value: float) -> None:
    assert formed(text, **settings) == value
