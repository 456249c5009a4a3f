"""How long a rollout worker may take until its next group is finished, from what was measured. Imports no torch."""

from dataclasses import dataclass


@dataclass
class AnswerDeadline:
    """``factor`` times the longest answer so far, at least ``least_s`` and at most ``most_s``, which also holds before there is an answer: an engine that
    starts cold is so never taken for a stuck one. An answer is a call of a worker, which ends when one of its groups is finished."""

    factor: float
    least_s: float
    most_s: float
    longest_s: float = 0.0

    def __call__(self) -> float:
        """Returns the seconds until an answer is overdue."""
        return self.most_s if not self.longest_s else min(self.most_s, max(self.least_s, self.factor * self.longest_s))

    def answered(self, seconds: float) -> None:
        """Records an answer that came in time."""
        self.longest_s = max(self.longest_s, seconds)

    def missed(self) -> None:
        """Doubles the factor: an answer that takes so long whoever gives it must come some day."""
        self.factor *= 2
        self.least_s *= 2
