"""Two judges of the answers to examples/questions.jsonl, one in each of the signatures that Tandem takes.

recipes/jsonl.yaml names them as examples/rewards.py:exact_symbol and examples/rewards.py:compute_score.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def first_word(completion: str) -> str:
    """What the model answered: its first word, without the full stop behind it."""
    words = completion.split()
    return words[0].rstrip(".,;") if words else ""


def exact_symbol(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """TRL's signature: all samples at once, a list as long as theirs. Every column of the file arrives by its name, one
    value a sample. 1 for the right symbol, else 0."""
    return [float(first_word(completion) == right) for completion, right in zip(completions, answer, strict=True)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """verl's signature: one sample. ``score`` is the value, ``acc`` says whether the sample is correct, further numbers
    are details. Half the credit is for the right first letter, the rest for the whole symbol in its right case."""
    given = first_word(solution_str)
    right_letter = given[:1].lower() == ground_truth[:1].lower()
    right = given == ground_truth
    return {"score": 0.5 * right_letter + 0.5 * right, "acc": float(right), "length": float(len(given))}
