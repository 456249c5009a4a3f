"""What a preemption costs on this machine: seconds to copy a cache out and back, and seconds to compute it again."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.kernels.api import BLOCK_TOKENS
from tandem.layout.shapes import ModelShapes, parameter_count

_FORGETTING = 0.9
"""What a new step leaves of the weight of the steps before it."""
_PROBE_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Linear models. ``token_s``: to compute a token again. ``pair_s``: its attention to one token before it. ``swap_token_s``:
    to copy its keys and values out and back. ``swap_start_s``: of a swap of any length."""

    token_s: float
    pair_s: float
    swap_token_s: float
    swap_start_s: float

    def swap_s(self, tokens: int) -> float:
        """Returns the seconds of a swap of ``tokens`` tokens, out and back."""
        return self.swap_start_s + tokens * self.swap_token_s

    def recompute_s(self, lost_tokens: int, tokens: int) -> float:
        """Returns the seconds to compute the last ``lost_tokens`` of ``tokens`` again; the blocks of the others are shared and
        stay."""
        return lost_tokens * (self.token_s + self.pair_s * (tokens - lost_tokens / 2))


class PreemptionCostMeter:
    """Measures ``PreemptionCosts`` while an engine runs. They decide about time only: swapped or computed again, a sequence has the same
    bits.

    Copies are timed once, when the costs are first needed; ``measure_swap(n)`` returns the seconds to copy n blocks one way. Computing is timed by
    the prefill steps that were run, as operations a second: a token takes two a parameter, and four for each component of a query and a
    token that it attends to.
    """

    def __init__(self, shapes: ModelShapes, num_blocks: int, measure_swap: Callable[[int], float]) -> None:
        self._token_operations = 2.0 * parameter_count(shapes)
        self._pair_operations = 4.0 * shapes.num_hidden_layers * shapes.query_size
        self._num_blocks = min(_PROBE_BLOCKS, num_blocks)
        self._measure_swap = measure_swap
        self._swap: tuple[float, float] | None = None
        self._operations = self._seconds = 0.0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Takes in a step of ``num_tokens`` tokens, most of them of prompts."""
        self._operations = _FORGETTING * self._operations + num_tokens * self._token_operations
        self._seconds = _FORGETTING * self._seconds + seconds

    def costs(self) -> PreemptionCosts | None:
        """Returns the costs as far as they are known; ``None`` before the first prefill step."""
        if not self._seconds:
            return None
        if self._swap is None:
            one, many = self._measure_swap(1), self._measure_swap(self._num_blocks)
            per_block = max(0.0, many - one) / max(1, self._num_blocks - 1)
            # Out and back.
            self._swap = 2 * per_block / BLOCK_TOKENS, 2 * max(0.0, one - per_block)
        per_operation = self._seconds / self._operations
        return PreemptionCosts(self._token_operations * per_operation, self._pair_operations * per_operation, *self._swap)
