"""How many tokens to guess for a sequence: more where guesses come true, fewer where they do not, none for a while where they never do."""

from dataclasses import dataclass

_MISSES_BEFORE_REST = 4
_LONGEST_REST = 64


@dataclass(slots=True)
class DraftLength:
    """Of one sequence. ``length``: tokens to propose next. ``misses``: proposals in a row of which nothing was accepted; from the
    fourth on each is followed by twice as many steps without one. ``rest``: such steps that are left."""

    most: int
    is_adaptive: bool = True
    length: int = 0
    misses: int = 0
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
        if accepted == proposed:
            self.length = min(self.most, max(self.length, proposed + 1))
        else:
            self.length = max(1, min(self.most, accepted + 1))
        self.misses = 0 if accepted else self.misses + 1
        if self.misses >= _MISSES_BEFORE_REST:
            self.rest = min(_LONGEST_REST, 1 << (self.misses - _MISSES_BEFORE_REST))
