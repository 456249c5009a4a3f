"""The low-rank adapter that is trained beside frozen weights (Hu et al., 2021), in the form in which trainer and engine compute with it.

W x becomes W x + (scale B) A x, in the order of the adapters of requests (``model.lora``), so that a served adapter has the bits of the trained one.
Matrices that are stacked (q, k and v; gate and up) have a stacked adapter: one product with A for all of them, then one with each one's rows of B.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.kernels.api import Kernels


class TrainedAdapter(nn.Module):
    """``lora_A`` [M r, K] and ``lora_B`` [N, r] of the M matrices with an adapter among those stacked in one linear layer, whose rows are ``rows``;
    ``adapted[i]``: whether matrix i has one. N: the rows of those that do."""

    def __init__(self, rows: Sequence[int], adapted: Sequence[bool], columns: int, rank: int, scale: float, like: Tensor) -> None:
        super().__init__()
        self.rows, self.adapted, self.rank, self.scale = tuple(rows), tuple(adapted), rank, scale
        self.lora_A = nn.Parameter(like.new_empty(sum(adapted) * rank, columns))
        self.lora_B = nn.Parameter(like.new_empty(sum(self.own_rows), rank))

    @property
    def own_rows(self) -> list[int]:
        """The rows of each matrix that has an adapter."""
        return [count for count, has_one in zip(self.rows, self.adapted, strict=True) if has_one]

    def around(self, weight: Any, pack: Callable[[Tensor], Any] = lambda matrix: matrix) -> "AdaptedWeight":
        """Returns ``weight``, plain or packed, with this adapter; ``pack`` brings a matrix into the same form."""
        like = self.lora_B
        scaled = (like.to(torch.promote_types(like.dtype, torch.float32)) * self.scale).to(like.dtype)
        own = iter(scaled.split(self.own_rows))
        second = tuple(pack(next(own)) if has_one else None for has_one in self.adapted)
        return AdaptedWeight(weight, pack(self.lora_A), second, self.rows, self.rank)

    def named(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns views of the adapters of the stacked matrices ``names``, by the names of ``layout.shapes``."""
        own = [name for name, has_one in zip(names, self.adapted, strict=True) if has_one]
        first, second = self.lora_A.detach().split(self.rank), self.lora_B.detach().split(self.own_rows)
        return {f"{name}.lora_A.weight": a for name, a in zip(own, first, strict=True)} | {
            f"{name}.lora_B.weight": b for name, b in zip(own, second, strict=True)
        }


class AdaptedWeight(NamedTuple):
    """A linear layer's ``weight`` with its adapter: ``first`` is A, ``second[i]`` scale B of matrix i, of ``rows[i]`` rows (``None``: it has none)."""

    weight: Any
    first: Any
    second: tuple[Any, ...]
    rows: tuple[int, ...]
    rank: int


def adapted_linear(linear: Callable[[Tensor, Any, Tensor | None], Tensor], x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Computes ``x[T, K]`` -> [T, N] as ``linear`` does, and adds the adapter's output where ``weight`` is an ``AdaptedWeight``."""
    if not isinstance(weight, AdaptedWeight):
        return linear(x, weight, bias)
    inner = linear(x, weight.first, None)
    shares, changes = iter(inner.split(weight.rank, dim=1)), []
    for count, second in zip(weight.rows, weight.second, strict=True):
        changes.append(x.new_zeros(len(x), count) if second is None else linear(next(shares).contiguous(), second, None))
    return linear(x, weight.weight, bias) + (changes[0] if len(changes) == 1 else torch.cat(changes, dim=1))


def packed_by(kernels: Kernels) -> Callable[[Tensor], Any]:
    """Returns the function that packs a matrix of an adapter, which is never rounded."""
    return lambda matrix: kernels.pack(matrix.detach().contiguous())


def is_adapter_parameter(name: str) -> bool:
    """Returns whether ``name``, as of ``Decoder.named_parameters``, is a parameter of an adapter."""
    return name.endswith((".lora_A", ".lora_B"))
