"""Detects a completion that repeats itself."""

from collections.abc import Sequence

from tandem.config.repetition_detection import RepetitionDetectionParams


class RepetitionDetector:
    """Watches the tokens of one completion. ``is_repeating``: whether the last ones were a pattern, ``params.min_count`` times in a row."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._params = params
        self._tokens: list[int] = []
        self.is_repeating = False

    def push(self, token: int) -> bool:
        """Appends a token; returns ``is_repeating``, which stays true once it is."""
        self._tokens.append(token)
        self.is_repeating = self.is_repeating or repeats(self._tokens, self._params)
        return self.is_repeating


def repeats(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Returns whether ``tokens`` end with a pattern of an allowed size, ``min_count`` times in a row."""
    count = len(tokens)
    for size in range(params.min_pattern_size, min(params.max_pattern_size, count // params.min_count) + 1):
        # The last token is compared first: it differs for most sizes.
        if tokens[-1] == tokens[-1 - size]:
            length = size * params.min_count
            if tokens[count - length : count - size] == tokens[count - length + size :]:
                return True
    return False
