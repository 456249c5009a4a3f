"""Measures how many prompt tokens a step may compute beside decoding sequences before these notice."""

from tandem.types.kv_cache import BLOCK_TOKENS

_FASTER, _SLOWER = 0.5, 0.1
"""The weight of a step without prompt tokens below the estimate, and of one above it: what other programs take is not the step's."""
_OF_TOKENS = 0.2
"""The weight of a measurement of prompt tokens, the same on both sides: an estimate that is too low makes steps too long."""
_MOST_RISE = 3.0
"""The most by which one measurement counts as above the estimate of a prompt token's seconds."""
_MEASURED_AGAIN = 64
"""Steps with prompt tokens after which one without them is measured again."""


class PrefillBudget:
    """Limits the prompt tokens of a step, so that it takes at most ``slowdown`` times as long as the step of its decoding sequences alone.

    These are the stall-free batches of Sarathi-Serve (arXiv 2403.02310) with a token budget from measured times instead of a profile. It decides when a
    prompt is computed, never which tokens are drawn.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._decode_s: dict[int, float] = {}
        """Seconds of a step without prompt tokens, by the bits of the number of its sequences."""
        self._token_s: float | None = None
        """Seconds by which a prompt token makes a step longer."""
        self._since_decode = 0

    def observe(self, num_decoded: int, num_prompt_tokens: int, seconds: float) -> None:
        """Records a step of ``num_decoded`` decoding sequences and ``num_prompt_tokens`` tokens of prompts."""
        if not num_prompt_tokens:
            if num_decoded:
                size = num_decoded.bit_length()
                known = self._decode_s.get(size, seconds)
                self._decode_s[size] = known + (_FASTER if seconds < known else _SLOWER) * (seconds - known)
                self._since_decode = 0
            return
        self._since_decode += 1
        before = self._step_s(num_decoded) if num_decoded else 0.0
        if before is not None:
            found = max(0.0, seconds - before) / num_prompt_tokens
            known = found if self._token_s is None else self._token_s
            self._token_s = known + _OF_TOKENS * ((min(found, _MOST_RISE * known) if known else found) - known)

    def limit(self, num_decoding: int) -> int | None:
        """Returns how many prompt tokens the next step may compute beside ``num_decoding`` sequences: at least a block's; 0 where a step
        without them is to be measured first; ``None``: any number, since nothing decodes."""
        if not num_decoding:
            return None
        step_s = self._step_s(num_decoding)
        if step_s is None or self._since_decode >= _MEASURED_AGAIN:
            return 0
        if not self._token_s:
            return BLOCK_TOKENS
        return max(BLOCK_TOKENS, int((self._slowdown - 1) * step_s / self._token_s))

    def _step_s(self, num_decoding: int) -> float | None:
        """Returns the seconds of a step of ``num_decoding`` sequences, from the nearest size that was measured."""
        size = num_decoding.bit_length()
        nearest = min(self._decode_s, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._decode_s[nearest]
