"""What a preemption costs: seconds to copy a cache out and back, and seconds to compute it again."""

from dataclasses import dataclass

from tandem.layout.bytes import kv_bytes_per_token
from tandem.layout.shapes import ModelShapes, parameter_count
from tandem.types.kv_cache import KVCacheDtype

_FLOPS = {"cpu": 1e11, "cuda": 4e14}
"""Matrix products a second in a prefill, by device: measured orders of magnitude, of which only the ratio to the next matters."""
_COPY_BYTES_PER_S = {"cpu": 5e9, "cuda": 4e10}
_COPY_START_S = {"cpu": 2e-5, "cuda": 2e-5}
"""To start one copy; each layer has at least two tensors, and each is copied twice."""


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Linear models. ``token_s``: to compute a token again. ``pair_s``: its attention to one token before it. ``swap_token_s``:
    to copy its keys and values out and back. ``swap_start_s``: of a swap of any length."""

    token_s: float
    pair_s: float
    swap_token_s: float
    swap_start_s: float

    def swap_s(self, tokens: int) -> float:
        return self.swap_start_s + tokens * self.swap_token_s

    def recompute_s(self, lost_tokens: int, tokens: int) -> float:
        """To compute the last ``lost_tokens`` of ``tokens`` again; the blocks of the others stay, since others hold them."""
        return lost_tokens * (self.token_s + self.pair_s * (tokens - lost_tokens / 2))


def preemption_costs(shapes: ModelShapes, dtype: str, device: str, kv_cache_dtype: KVCacheDtype = "auto") -> PreemptionCosts:
    """The costs of a model on a device of type ``device`` (``cpu`` or ``cuda``; others count as ``cuda``). A token takes two
    operations a parameter, and four for each component of a query and a token that it sees."""
    kind = device if device in _FLOPS else "cuda"
    return PreemptionCosts(
        token_s=2 * parameter_count(shapes) / _FLOPS[kind],
        pair_s=4 * shapes.num_layers * shapes.query_size / _FLOPS[kind],
        swap_token_s=2 * kv_bytes_per_token(shapes, dtype, kv_cache_dtype) / _COPY_BYTES_PER_S[kind],
        swap_start_s=4 * shapes.num_layers * _COPY_START_S[kind],
    )
