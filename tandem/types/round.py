"""A round of a step: groups that were drawn together, and their scores."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tandem.types.sample import Sample
from tandem.types.score import Score


class Round(NamedTuple):
    """Samples, group by group in the order in which their prompts were dispatched, and a score for each of them, in any order."""

    samples: Sequence[Sample]
    scores: Sequence[Score]


def joined(rounds: Iterable[Round]) -> Round:
    """Returns all samples and scores of ``rounds`` as one."""
    rounds = list(rounds)
    return Round([sample for each in rounds for sample in each.samples], [score for each in rounds for score in each.scores])
