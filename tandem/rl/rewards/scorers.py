"""Answers scored as the authors of a benchmark score them: GSM8K, MATH and multiple choice."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.rl.rewards.judgement import Judgement, infrastructure_fault, model_fault, number, shortened
from tandem.rl.rewards.math_answers import are_equivalent, final_box

Scorer = Callable[[str, Any, float], Judgement]
"""Takes a completion, the ground truth and the value of a completion without an answer."""

GSM8K_CHARACTERS = 300
"""The end of a completion in which verl looks for the answer of GSM8K."""
MATH_SOURCES = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_GSM8K = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_SOLUTION = re.compile(r"\n#### -?[0-9.,]+\s*\Z")
_CHOICE = r"[\s*$]*\(?\s*(?:\\text\s*\{)?\s*\(?([A-Ja-j])\b(?!')"
_CHOICES = (re.compile(rf"\\boxed\s*\{{{_CHOICE}"), re.compile(rf"(?i:answer)\s*(?:is)?\s*:?{_CHOICE}"), re.compile(r"\A\s*\(?([A-J])\)?\s*(?:[.:)]|\Z)"))


def score_gsm8k(completion: str, truth: Any, fault_value: float) -> Judgement:
    """Compares the number after the last ``####`` with the ground truth, which may be the whole solution, as verl's scorer does (``gsm8k.compute_score``,
    method ``strict``): as texts without thousands separators."""
    if not _is_answer(truth):
        return _no_answer(truth)
    given = _GSM8K.findall(completion[-GSM8K_CHARACTERS:])
    if not given:
        return model_fault(fault_value, "no number after '#### '")
    solved = _GSM8K.search(str(truth))
    wanted = solved[1] if solved else str(truth).strip()
    right = given[-1].replace(",", "") == wanted.replace(",", "")
    return number(float(right), correct=right)


def score_math(completion: str, truth: Any, fault_value: float) -> Judgement:
    r"""Compares what the last ``\boxed`` holds with the ground truth, which may be the whole solution, as the MATH benchmark and verl's scorer do
    (``math_reward.compute_score``)."""
    if not _is_answer(truth):
        return _no_answer(truth)
    given = final_box(completion)
    if given is None:
        return model_fault(fault_value, "no \\boxed{...}")
    boxed = final_box(str(truth))
    right = are_equivalent(given, str(truth) if boxed is None else boxed)
    return number(float(right), correct=right)


def score_multiple_choice(completion: str, truth: Any, fault_value: float) -> Judgement:
    r"""Compares the chosen letter, in ``\boxed{B}``, after ``Answer:`` or ``answer is``, or at the beginning, with the ground truth: a letter, or the index
    of the choice as in MMLU."""
    if not _is_answer(truth):
        return _no_answer(truth)
    wanted = chr(ord("A") + truth) if isinstance(truth, int) and 0 <= truth < 10 else chosen_letter(str(truth))
    if wanted is None:
        return infrastructure_fault(f"the ground truth {shortened(truth)} is not the letter of a choice")
    given = chosen_letter(completion)
    if given is None:
        return model_fault(fault_value, "no letter of a choice")
    return number(float(given == wanted), correct=given == wanted)


def chosen_letter(text: str) -> str | None:
    """Returns the letter that ``text`` chooses, A to J, or ``None``."""
    for pattern in _CHOICES:
        letters = pattern.findall(text)
        if letters:
            return str(letters[-1]).upper()
    return None


SCORERS: Mapping[str, Scorer] = {"gsm8k": score_gsm8k, "math": score_math, "multiple_choice": score_multiple_choice}


def scorer_of(data_source: Any, truth: Any) -> Scorer | None:
    r"""Returns the scorer that verl has for rows with this ``data_source``, or that of the benchmark whose whole solutions look like ``truth``: GSM8K's end
    with ``#### 72``, those of MATH have a ``\boxed``. ``None`` for others."""
    if data_source == "openai/gsm8k" or (isinstance(truth, str) and _GSM8K_SOLUTION.search(truth)):
        return score_gsm8k
    return score_math if data_source in MATH_SOURCES or (isinstance(truth, str) and final_box(truth) is not None) else None


def _is_answer(truth: Any) -> bool:
    return isinstance(truth, str | int | float) and not isinstance(truth, bool)


def _no_answer(truth: Any) -> Judgement:
    return infrastructure_fault(f"the ground truth {shortened(truth)} is neither a text nor a number")
