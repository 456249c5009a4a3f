r"""Answers are scored as the authors of the benchmarks score them, on their own examples and against their code where a package has it."""

import itertools
import random
from typing import Any

import pytest

from tandem.config.rewards import AnswerMatcherConfig, RewardFunctionConfig, RewardsConfig
from tandem.rl.rewards.answer_matcher import match_answer
from tandem.rl.rewards.judgement import Item, JudgeCall
from tandem.rl.rewards.math_answers import are_equivalent, final_box
from tandem.rl.rewards.rule_based import make_judge
from tandem.rl.rewards.scorers import chosen_letter, score_gsm8k, score_math, score_multiple_choice
from tandem.types import ScoreState

NATALIA = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)
"""The first solution of GSM8K's training set."""


@pytest.mark.parametrize(
    ("completion", "truth", "value"),
    [
        # What verl's gsm8k.compute_score gives for the same texts.
        (NATALIA, "72", 1.0),
        (NATALIA, NATALIA, 1.0),
        ("48/2 = 24 in May, 48 + 24 = 72 altogether.\n#### 72", NATALIA, 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "so 1,234.\n#### 1,234", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 7\nno, #### 72", "72", 1.0),
        ("#### 72\nno, #### 7", "72", 0.0),
        ("#### 72.", "72", 0.0),
        ("The answer is 72.", "72", 0.0),
        ("####72", "72", 0.0),
        ("#### $72", "72", 0.0),
        ("#### 72" + " " * 300, "72", 0.0),
        ("#### 72", 72, 1.0),
    ],
)
def test_gsm8k_is_scored_as_verl_scores_it(completion: str, truth: Any, value: float) -> None:
    assert score_gsm8k(completion, truth, 0.0).value == value


EQUIVALENT = [
    # hendrycks/math, modeling/math_equivalence_test.py, in its order.
    ("\\tfrac{1}{2} + \\\frac1{72}", "\\\\frac{1}{2} + 2/3", False),
    ("10, 4, -2", "4, 10, -2", False),
    ("10, 4, 2", "4, 12, 2", False),
    ("\\tfrac{1}{2} +\\! \\frac1{72}", "\\\\dfrac{1}{2} +\\frac{1}{72}", True),
    ("10\\text{ units}", "10 ", True),
    ("10\\text{ units}", "100 ", False),
    ("10", "\\$10", True),
    ("\\left(x-2\\right)\\left(x+2\\right)", "(x-2)(x+2)", True),
    ("0.1, 4, 2", "4, .1, 2", False),
    ("0.1", ".1", True),
    ("10\\%", "10", True),
    ("10\\sqrt{3} + \\sqrt4", "10\\sqrt3 + \\sqrt{4}", True),
    ("\\frac34i", "\\frac{3}{4}i", True),
    ("\\tfrac83", "\\frac{8}{3}", True),
    ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0", False),
    ("1/2", "\\frac{1}{2}", True),
]


@pytest.mark.parametrize(("left", "right", "expected"), EQUIVALENT)
def test_math_answers_are_compared_as_in_the_benchmarks_own_tests(left: str, right: str, expected: bool) -> None:
    assert are_equivalent(left, right) is expected
    assert score_math(f"so it is $\\boxed{{{left}}}$.", f"We get $\\boxed{{{right}}}$.", 0.0).value == float(expected)
    assert score_math(f"so it is $\\boxed{{{left}}}$.", right, 0.0).value == float(expected)


PIECES = (
    "\\frac", "\\dfrac", "\\sqrt", "{", "}", "1", "2", "3", "x", "y", " ", ".", "0.5", "=", "k", "\\text{ cm}", "\\%", "\\$", "^\\circ", "\\left(", "\\right)",
    "\\!", ",",
)  # fmt: skip
EDITS = (("\\dfrac", "\\frac"), (" ", ""), ("\\%", ""), (".", "0."), ("{", ""), ("\\!", ""))


def test_math_answers_agree_with_the_published_comparison_on_random_latex() -> None:
    published = pytest.importorskip("lm_eval.tasks.hendrycks_math.utils")
    draw = random.Random(5)
    # Without slashes: after one, this copy gives up where the benchmark's own code goes on.
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(3000)]
    # Pairs that differ by one piece are often equivalent.
    pairs = [*((text, text.replace(*draw.choice(EDITS))) for text in texts), *itertools.pairwise(texts)]
    found = [are_equivalent(*pair) for pair in pairs]
    assert found == [published.is_equiv(*pair) for pair in pairs]
    assert 1000 < sum(found) < len(pairs) - 1000


def test_the_last_box_agrees_with_the_published_extraction_on_random_texts() -> None:
    published = pytest.importorskip("lm_eval.tasks.hendrycks_math.utils")
    draw = random.Random(6)
    for _ in range(3000):
        text = "".join(draw.choices(["\\boxed{", "\\boxed ", "{", "}", "}", "1", "$", " and ", "x"], k=draw.randint(1, 8)))
        try:
            expected = published.remove_boxed(published.last_boxed_only_string(text))
        except (AssertionError, TypeError, AttributeError, IndexError):
            expected = None
        assert final_box(text) == expected, text


@pytest.mark.parametrize(
    ("completion", "truth", "value"),
    [
        # OpenAI's simple-evals: the last line is "Answer: $LETTER".
        ("The mitochondrion.\nAnswer: B", "B", 1.0),
        ("Answer: $C$", "C", 1.0),
        ("answer: b", "B", 1.0),
        ("**Answer: (D)**", "D", 1.0),
        ("The answer is (A).", "A", 1.0),
        ("Answer: A\nno.\nAnswer: D", "D", 1.0),
        ("so \\boxed{B}", "B", 1.0),
        ("so \\boxed{\\text{(C)}}", "C", 1.0),
        ("B", "B", 1.0),
        ("(B) Paris", "B", 1.0),
        ("B. Paris", "B", 1.0),
        ("Answer: B", "A", 0.0),
        ("Answer: B", 1, 1.0),
        ("Answer: B", "(B) Paris", 1.0),
    ],
)
def test_a_choice_is_the_letter_that_the_completion_names(completion: str, truth: Any, value: float) -> None:
    assert score_multiple_choice(completion, truth, 0.0).value == value


@pytest.mark.parametrize("text", ["", "I do not know.", "A man walks in.", "The answer is unclear", "Answer: because"])
def test_a_text_without_a_choice_has_none(text: str) -> None:
    assert chosen_letter(text) is None
    assert score_multiple_choice(text, "B", -1.0).state is ScoreState.MODEL_FAULT
    assert score_multiple_choice("B", "none of them", 0.0).state is ScoreState.INFRASTRUCTURE_FAULT


# huggingface/Math-Verify: the example of its README, and tests/test_all.py.
MATH_VERIFY = [
    ("${1,3} \\cup {2,4}$", "${1,2,3,4}$", True), ("10/9", "\\frac{10}{9}", True), ("-10/9", "-\\frac{10}{9}", True), ("7425000", "7,425,000", True),
    ("1000.99", "the number is not 10 which is 1,000.99€", True), ("$[0,9)$", "$[0,1)$", False),
    ("$(0,9)$", "$[0,9)$", False), ("$9$", "Answer \\[ 9 \\]", True),
    ("$1/3$", "$\\frac13 $", True), ("$\\sqrt{3}$", "$\\sqrt3 $", True), ("$1/3$", "$k = \\frac{1}{3}$", True), ("$28\\%$", "28 percent", True),
    ("$0.28$", "28", False), ("2", "AZYUK2A", False),
    ("$\\frac{14}{3}$", r"$f(-2)+f(-1)+f(0)=\frac{-8}{-4}+\frac{-5}{-3}+\frac{-2}{-2}=2+\frac{5}{3}+1=\boxed{\frac{14}{3}}$", True),
    ("$\\text{Evelyn}$", r"her average speed is greater than any of theirs. Therefore, $\boxed{\text{Evelyn}}$ is our answer.", True),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "completion", "expected"), MATH_VERIFY)
def test_math_verify_decides_as_in_its_own_tests(truth: str, completion: str, expected: bool) -> None:
    pytest.importorskip("math_verify")
    assert match_answer(completion, truth, AnswerMatcherConfig(compare="math_verify"), 0.0).value == float(expected)


def test_a_ground_truth_that_is_a_whole_solution_stands_for_its_answer() -> None:
    after = AnswerMatcherConfig(after="####", extract="last_number", compare="numeric")
    assert match_answer("so #### 72.0", NATALIA, after, 0.0).value == match_answer("#### 72", "72", after, 0.0).value == 1.0
    assert match_answer("72", NATALIA, after, -1.0).state is ScoreState.MODEL_FAULT
    boxed = AnswerMatcherConfig(extract="boxed")
    assert match_answer("$\\boxed{\\frac{1}{2}}$", "Half: $\\boxed{\\frac{1}{2}}$.", boxed, 0.0).value == 1.0
    assert match_answer("$\\boxed{2}$", "2", boxed, 0.0).value == 1.0


def test_the_tasks_own_reward_is_verls_scorer_of_the_rows_data_source() -> None:
    def judged(columns: dict[str, Any], completion: str, truth: str, **settings: Any) -> float | None:
        function = RewardFunctionConfig("task", **settings)
        item = Item("s", "p", completion, (), truth, "dataset", columns)
        (judgement,) = make_judge(function, RewardsConfig(functions=(function,))).judge([item], JudgeCall())  # type: ignore[misc]
        value: float | None = judgement.value
        return value

    assert judged({"data_source": "openai/gsm8k"}, "so\n#### 72", "72") == 1.0
    assert judged({"data_source": "lighteval/MATH"}, "$\\boxed{\\tfrac12}$", "\\frac{1}{2}") == 1.0
    assert judged({"data_source": "mine"}, "so\n#### 72", "72") == 0.0
    # The benchmarks' own rows, whose answers are whole solutions.
    assert judged({}, "so\n#### 72", NATALIA) == 1.0
    assert judged({}, "so $\\boxed{\\tfrac12}$.", "Half of it, so $\\boxed{\\frac{1}{2}}$.") == 1.0
    assert judged({"data_source": "openai/gsm8k"}, "so 72", "72", answer=AnswerMatcherConfig(extract="last_number")) == 1.0
