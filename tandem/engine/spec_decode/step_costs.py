"""Measures how long a step takes by the tokens that it feeds, and what a further draft token costs."""

_FASTER, _SLOWER = 0.5, 0.02
"""The weight of a step that was faster than the estimate of its size, and of one that was slower: what other programs take is not the step's."""
_APART = 1.5
"""The ratio of two sizes from which their difference says what a token costs."""
_MARGIN = 0.7
"""Drafts are not looked for where their cost is above this share of what the best are worth, because looking takes time too."""
_REMEMBERED = 256
"""Steps after which the seconds of a size are measured again."""


class StepCosts:
    """The seconds of undisturbed steps without prefills, for each power of two of the tokens that they feed.

    A draft token costs what it makes the step longer, and gains a token as often as it is accepted. It pays where the gain's share of the tokens that the step
    draws is above the cost's share of its time. The costs decide how many draft tokens are fed, never which tokens are drawn. Before steps of several sizes
    were measured, draft tokens pay in steps of at most ``limit`` sequences.
    """

    def __init__(self, limit: int) -> None:
        self.best_acceptance = 0.5
        """The rate at which the best draft tokens are accepted."""
        self._limit = limit
        self._sizes: dict[int, tuple[float, float, int]] = {}
        """Tokens and seconds, and the newest step, by the bits of the number of tokens."""
        self._step = 0
        self._worth: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float, is_pure: bool = True) -> None:
        """Records a step that fed ``tokens`` tokens; one that is not ``is_pure`` computed prompts too, and says nothing."""
        if not is_pure:
            return
        self._step += 1
        size = tokens.bit_length()
        mean_tokens, mean_s, _ = self._sizes.get(size, (float(tokens), seconds, 0))
        weight = _FASTER if seconds * mean_tokens < mean_s * tokens else _SLOWER
        self._sizes[size] = (mean_tokens + weight * (tokens - mean_tokens), mean_s + weight * (seconds - mean_s), self._step)
        self._worth.clear()

    def pays(self, sequences: int) -> bool:
        """Returns whether a step of ``sequences`` decoding sequences gains enough with the best draft tokens that drafts are looked for at all."""
        return self.worth(sequences) < _MARGIN * self.best_acceptance

    def worth(self, sequences: int) -> float:
        """Returns the probability of acceptance above which a draft token pays in a step of ``sequences`` decoding sequences: 1 or more,
        if none does."""
        if sequences not in self._worth:
            self._worth[sequences] = self._measured_worth(sequences)
        return self._worth[sequences]

    def _measured_worth(self, sequences: int) -> float:
        bits = sequences.bit_length()
        own = self._sizes.get(bits)
        other = None if own is None else self._apart(own[0], bits + 1, bits + 2, bits - 1, bits - 2)
        if own is None or other is None:
            return 0.0 if sequences <= self._limit else 1.0
        slope = max(0.0, (other[1] - own[1]) / (other[0] - own[0]))
        step_s = own[1] + slope * (sequences - own[0])
        return sequences * slope / step_s if step_s > 0 else 1.0

    def _apart(self, tokens: float, *sizes: int) -> tuple[float, float, int] | None:
        """Returns the first of ``sizes`` that was measured lately and is not nearly ``tokens``."""
        known = (self._sizes[bits] for bits in sizes if bits in self._sizes)
        return next((size for size in known if self._step - size[2] <= _REMEMBERED and not tokens / _APART < size[0] < tokens * _APART), None)
