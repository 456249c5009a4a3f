"""Adapts the number of draft tokens of a sequence: more while they are accepted, fewer when they are rejected, and pauses when too few are."""

from dataclasses import dataclass

_MEMORY = 0.8
"""The decay of the moving average of accepted first draft tokens, per proposal."""
_LONGEST_REST = 64
"""Maximum steps without a proposal."""


@dataclass(slots=True)
class DraftLength:
    """The draft length of one sequence. ``most``: maximum tokens to propose. ``worth``: the fraction of proposals whose first token must be
    accepted to pay for them; below it each proposal is followed by a rest twice as long as the one before. ``adapts_length``: whether the
    number of tokens follows what is accepted, beside the rests. ``length``: tokens to propose next. ``hits``: moving
    average of that fraction. ``rests``: consecutive rests. ``rest``: remaining steps of the current rest."""

    most: int
    worth: float
    is_adaptive: bool = True
    adapts_length: bool = True
    length: int = 0
    hits: float = 1.0
    rests: int = 0
    rest: int = 0

    def __post_init__(self) -> None:
        self.length = self.most

    def next(self) -> int:
        """Returns the number of tokens to propose in this step."""
        if self.rest:
            self.rest -= 1
            return 0
        return self.length

    def learn(self, proposed: int, accepted: int) -> None:
        """Adapts to a proposal of ``proposed`` tokens, of which ``accepted`` were accepted."""
        if not self.is_adaptive or not proposed:
            return
        if self.adapts_length:
            self.length = max(1, min(self.most, max(self.length, proposed + 1) if accepted == proposed else accepted + 1))
        self.hits = _MEMORY * self.hits + (1 - _MEMORY) * (accepted > 0)
        if self.hits >= self.worth:
            self.rests = 0
        else:
            self.rests += 1
            self.rest = min(_LONGEST_REST, 1 << self.rests)
