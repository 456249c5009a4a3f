"""Measures how long a step takes by the tokens that it feeds, and what a further draft token costs."""

_DECAY = 0.8
"""The factor by which a step reduces the weight of earlier ones of about the same size."""
_REMEMBERED = 256
"""Steps after which the seconds of a size are measured again."""


class StepCosts:
    """The seconds of steps without prefills, as a moving mean for each power of two of the tokens that they feed.

    A draft token costs what it makes the step longer, and gains a token as often as it is accepted. It pays where the gain's share of the tokens that the step
    draws is above the cost's share of its time. The costs decide how many draft tokens are fed, never which tokens are drawn.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float, int]] = {}
        """Mean tokens and seconds, and the newest step, by the bits of the number of tokens."""
        self._step = 0
        self._worth: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Records a step that fed ``tokens`` tokens."""
        self._step += 1
        size = tokens.bit_length()
        mean_tokens, mean_s, _ = self._sizes.get(size, (float(tokens), seconds, 0))
        self._sizes[size] = (_DECAY * mean_tokens + (1 - _DECAY) * tokens, _DECAY * mean_s + (1 - _DECAY) * seconds, self._step)
        self._worth.clear()

    def worth(self, sequences: int) -> float:
        """Returns the probability of acceptance above which a draft token pays in a step of ``sequences`` decoding sequences; 0 where the cost is unknown,
        so that it is measured."""
        if sequences not in self._worth:
            self._worth[sequences] = self._measured_worth(sequences)
        return self._worth[sequences]

    def _measured_worth(self, sequences: int) -> float:
        own = self._sizes.get(sequences.bit_length())
        above = self._above(sequences)
        if own is None or above is None or above[0] <= own[0]:
            return 0.0
        slope = max(0.0, above[1] - own[1]) / (above[0] - own[0])
        step_s = own[1] + slope * (sequences - own[0])
        return min(1.0, sequences * slope / step_s) if step_s > 0 else 1.0

    def _above(self, sequences: int) -> tuple[float, float, int] | None:
        """Returns the next larger size that was measured lately, of at most four times the tokens."""
        for bits in (sequences.bit_length() + 1, sequences.bit_length() + 2):
            size = self._sizes.get(bits)
            if size is not None and self._step - size[2] <= _REMEMBERED:
                return size
        return None
