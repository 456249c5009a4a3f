"""How many draft tokens to propose for a sequence: more where they are accepted, fewer where they are rejected, none for a while where too
few are accepted."""

from dataclasses import dataclass

_MEMORY = 0.8
"""The weight that the share of accepted first draft tokens keeps with each proposal."""
_LONGEST_REST = 64


@dataclass(slots=True)
class DraftLength:
    """Of one sequence. ``most``: tokens to propose at most. ``worth``: the share of proposals whose first token must be accepted to pay
    for them; below it each proposal is followed by a rest, twice as long as the one before. ``length``: tokens to propose next. ``hits``: that
    share lately. ``rest``: steps without a proposal that are left."""

    most: int
    worth: float
    is_adaptive: bool = True
    length: int = 0
    hits: float = 1.0
    rests: int = 0
    rest: int = 0

    def __post_init__(self) -> None:
        self.length = self.most

    def next(self) -> int:
        """Tokens to propose in this step."""
        if self.rest:
            self.rest -= 1
            return 0
        return self.length

    def learn(self, proposed: int, accepted: int) -> None:
        """Take in what became of a proposal."""
        if not self.is_adaptive or not proposed:
            return
        self.length = max(1, min(self.most, max(self.length, proposed + 1) if accepted == proposed else accepted + 1))
        self.hits = _MEMORY * self.hits + (1 - _MEMORY) * (accepted > 0)
        if self.hits >= self.worth:
            self.rests = 0
        else:
            self.rests += 1
            self.rest = min(_LONGEST_REST, 1 << self.rests)
