"""Decides by the measured time of steps whether draft tokens are fed, and spends a small share of the time on finding out."""

import math
import time
from dataclasses import dataclass

_ALLOWED_LOSS = 0.01
"""The share of the time that steps with draft tokens may lose, all together."""
_TRIALS = 4
"""Steps with draft tokens, and plain ones, after which their time is known."""
_FIRST, _MOST = 1.0, 2.0
"""What may be lost at once, in plain steps: when an engine begins, and ever."""
_REFRESHED = 32
"""Steps with draft tokens after which one without measures again what they are compared with."""
_PLAIN, _DRAFTED = 0.2, 0.05
"""The weights of a step in the moving averages."""
_LONGEST = 3.0
"""A step counts as at most so many times what was expected of it: what another program took is not the step's."""


@dataclass(slots=True)
class _Measured:
    """Steps of about as many sequences. ``plain_s``: seconds of a step without draft tokens, for each sequence, after ``plain_count`` of them, which had
    ``plain_rows`` on average and took ``plain_step_s``. Over ``count`` steps with them, ``since_plain`` after the last plain one: ``spent_s``, and how many
    ``sequences`` decoded, were ``proposed`` and ``accepted``, and ``steps``, as in ``DraftSwitch.observe``."""

    plain_s: float = 0.0
    plain_count: int = 0
    plain_rows: float = 0.0
    plain_step_s: float = 0.0
    spent_s: float = 0.0
    sequences: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0
    steps: float = 0.0
    count: int = 0
    since_plain: int = 0

    def add(self, weight: float, **values: float) -> None:
        """Moves the average of each of ``values`` towards it."""
        for name, value in values.items():
            setattr(self, name, getattr(self, name) + weight * (value - getattr(self, name)))

    def saved_by(self, sequences: float, accepted: float, steps: float, row_s: float) -> float:
        """Returns the seconds of the plain steps that one step with draft tokens saves. A plain step takes as long for any number of sequences, and longer
        for each of them by ``row_s``, and at most by as much as for a draft token."""
        plain_s = sequences * self.plain_s
        token_s = min(row_s, self.plain_s, max(0.0, self.spent_s - self.sequences * self.plain_s) / max(1.0, self.proposed))
        return (plain_s - sequences * token_s) * steps + token_s * (sequences + accepted)


class DraftSwitch:
    """Whether a step of so many decoding sequences feeds draft tokens; what is measured for one number holds for those of the same power of two.

    A step with draft tokens takes longer, for proposing and for verifying them, and draws more tokens. It pays if the plain steps that it saves take longer.
    These are not those of as many tokens: while nothing waits for a row, steps go on until the last sequence ends, and what the others are ahead of it makes
    them smaller, not fewer. Where it does not pay, and before it is known, a step is tried when the engine has saved up what it may lose: ``_ALLOWED_LOSS``
    of its time. So the more a trial loses, the fewer there are. Up to ``limit`` sequences a first trial is assumed to lose nothing, above it as much as a
    step takes.
    """

    def __init__(self, limit: int, device: str = "cpu") -> None:
        self._limit = limit
        # On a CPU other programs take time from single steps, which says nothing of what was computed in them.
        self._clock = time.thread_time if device == "cpu" else time.perf_counter
        self._began_s = 0.0
        self._measured: dict[int, _Measured] = {}
        self._allowance_s = 0.0
        self._has_begun = False

    def begin(self) -> None:
        """Marks the beginning of a step."""
        self._began_s = self._clock()

    @property
    def elapsed_s(self) -> float:
        """The seconds since ``begin``: of the engine's thread on a CPU, else by the clock."""
        return self._clock() - self._began_s

    def pays(self, sequences: int) -> bool:
        """Returns whether a step of ``sequences`` decoding sequences may feed draft tokens."""
        known = self._measured.get(sequences.bit_length())
        if known is None or known.plain_count < _TRIALS:
            return False
        if known.count < _TRIALS:
            return self._allowance_s >= (0.0 if sequences <= self._limit else sequences * known.plain_s)
        saved_s = self._saved_s(known)
        if saved_s >= known.spent_s:
            # The newest steps may have lost what those before them had saved.
            return known.since_plain < _REFRESHED and self._allowance_s >= 0
        return self._allowance_s >= known.spent_s - saved_s

    def _saved_s(self, known: _Measured) -> float:
        """Returns the mean seconds of the plain steps that a step with draft tokens saves."""
        return known.saved_by(known.sequences, known.accepted, known.steps, self._row_s(known))

    def _row_s(self, known: _Measured) -> float:
        """Returns the seconds by which a plain step is longer for one more sequence, as those of the next smaller number that was measured say; infinite where
        none was."""
        smaller = [other for other in self._measured.values() if other.plain_count >= _TRIALS and other.plain_rows < known.plain_rows - 0.5]
        if not smaller:
            return math.inf
        nearest = max(smaller, key=lambda other: other.plain_rows)
        return max(0.0, known.plain_step_s - nearest.plain_step_s) / (known.plain_rows - nearest.plain_rows)

    def observe(self, sequences: int, proposed: int, accepted: int, seconds: float, steps: float | None = None) -> None:
        """Records a step of ``sequences`` decoding sequences and no prompts, which verified ``proposed`` draft tokens and accepted ``accepted``. ``steps``: how
        many plain steps fewer are left after it until the last sequence ends; ``None``: others take the rows of those that end, so that all tokens count."""
        known = self._measured.setdefault(sequences.bit_length(), _Measured())
        expected = sequences * known.plain_s
        if not proposed:
            taken = min(seconds, _LONGEST * expected) if expected else seconds
            known.plain_count += 1
            known.add(max(_PLAIN, 1 / known.plain_count), plain_rows=sequences, plain_step_s=taken)
            if known.plain_count <= _TRIALS:
                # The first steps of an engine take longer than all others; what pays beside them alone does not pay.
                known.plain_s = taken / sequences if known.plain_count == 1 else min(known.plain_s, taken / sequences)
            else:
                known.plain_s += _PLAIN * (taken / sequences - known.plain_s)
            known.since_plain = 0
            if not self._has_begun:
                self._has_begun, self._allowance_s = True, _FIRST * taken
        else:
            taken = min(seconds, _LONGEST * known.spent_s if known.count else seconds)
            steps = 1 + accepted / sequences if steps is None else steps
            known.count, known.since_plain = known.count + 1, known.since_plain + 1
            known.add(max(_DRAFTED, 1 / known.count), spent_s=taken, sequences=sequences, proposed=proposed, accepted=accepted, steps=steps)
            self._allowance_s += known.saved_by(sequences, accepted, steps, self._row_s(known)) - taken
        most_s = max(_MOST * sequences * known.plain_s, 2 * (known.spent_s - self._saved_s(known)))
        self._allowance_s = min(self._allowance_s + _ALLOWED_LOSS * taken, most_s)
