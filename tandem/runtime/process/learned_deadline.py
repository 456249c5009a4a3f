"""Deadlines that are learned from measured times: of a call, of a worker's answer, of a rank's next sign of life."""

from dataclasses import dataclass


@dataclass
class LearnedDeadline:
    """``factor`` times the longest time so far, at least ``least_s`` and at most ``most_s``, which also holds before anything was measured: what
    starts cold is so never taken for stuck. ``after``: the answers after which what was learned holds."""

    factor: float
    least_s: float
    most_s: float
    longest_s: float = 0.0
    answers: int = 0
    after: int = 1

    def __call__(self) -> float:
        """Returns the seconds until what is waited for is overdue."""
        return self.most_s if self.answers < self.after else min(self.most_s, max(self.least_s, self.factor * self.longest_s))

    def answered(self, seconds: float) -> None:
        """Records what came in time."""
        self.answers += 1
        self.longest_s = max(self.longest_s, seconds)

    def missed(self) -> None:
        """Doubles the deadline: a worker that is only slow must finish some time."""
        self.factor *= 2
        self.least_s *= 2
