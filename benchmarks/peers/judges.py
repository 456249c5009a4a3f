"""The rewards of the recipes for the peer, which has none of our packages. Standard library only. ``time_to_accuracy.py`` asserts that both sides give every
sample of the start model the same reward."""

from fractions import Fraction


def exact(completion: str, truth: str) -> float:
    """1.0 where the completion is the answer, without surrounding white space."""
    return float(completion.strip() == truth.strip())


def numeric(completion: str, truth: str) -> float:
    """1.0 where both are the same number: 07 is 7."""
    try:
        return float(Fraction(completion.strip()) == Fraction(truth))
    except (ValueError, ZeroDivisionError):
        return 0.0


def spell_backward(completion: str, truth: str) -> float:
    """``score_answer`` of ``reasoning_gym``'s dataset: the share of positions with the right letter; of a longer text 0.8 at most, where that sum of shares
    is 1.0 in floating point."""
    answer, truth = completion.strip().lower(), truth.lower()
    if answer == truth:
        return 1.0
    reward = 0.0
    for given, right in zip(answer, truth, strict=False):
        # One after the other: sum() rounds less often in newer versions of Python.
        reward += 1 / len(truth) if given == right else 0.0
    return reward - 0.2 if reward == 1.0 else reward


JUDGES = {"exact": exact, "numeric": numeric, "reasoning_gym:spell_backward": spell_backward}
