"""When a completion counts as repeating itself, with vLLM's names."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends a completion whose last tokens are one pattern, `min_count` times in a row."""

    max_pattern_size: int = 64
    """The longest pattern that is looked for, in tokens."""
    min_pattern_size: int = 1
    """The shortest pattern that is looked for, in tokens."""
    min_count: int = 8
    """How many times in a row a pattern must occur."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if not 1 <= self.min_pattern_size <= self.max_pattern_size:
            raise UserError(
                f"'repetition_detection.min_pattern_size' is {self.min_pattern_size} and max_pattern_size {self.max_pattern_size}; a pattern has at least 1 "
                "token, and the longest must not be shorter than the shortest"
            )
        if self.min_count < 2:
            raise UserError(f"'repetition_detection.min_count' is {self.min_count}; a pattern that occurs once is no repetition, so it must be at least 2")
