"""Two reward functions for examples/questions.jsonl, one in each of the signatures that Tandem supports.

recipes/dataset.yaml names them as examples/rewards.py:exact_symbol and examples/rewards.py:compute_score.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def first_word(completion: str) -> str:
    """Returns the first word of the completion, without punctuation after it."""
    words = completion.split()
    return words[0].rstrip(".,;") if words else ""


def exact_symbol(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """TRL's signature: takes all samples and returns one score for each. The columns of the file are passed by name, with one
    value per sample. Returns 1 for the correct symbol and 0 otherwise."""
    return [float(first_word(completion) == right) for completion, right in zip(completions, answer, strict=True)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """verl's signature: takes one sample. ``score`` is the value, ``acc`` whether the sample is correct, other numbers are
    details. Half of the score is for the correct first letter, the rest for the whole symbol in the correct case."""
    given = first_word(solution_str)
    right_letter = given[:1].lower() == ground_truth[:1].lower()
    right = given == ground_truth
    return {"score": 0.5 * right_letter + 0.5 * right, "acc": float(right), "length": float(len(given))}
