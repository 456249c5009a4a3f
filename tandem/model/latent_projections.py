"""The parameters of one layer's multi-head latent attention, and the form of them that the forward pass uses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.kernels.api import Kernels
from tandem.layout.latent_attention import WITHIN_HEADS, LatentAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.linear import Linear
from tandem.model.trained_adapter import AdaptedWeight


class LatentProjections(nn.Module):
    """The matrices before the attention's output, by their names in the folder, and the norms of the compressed vectors. ``shapes``: of this rank, whose heads
    divide ``q_proj``, ``q_b_proj`` and ``kv_b_proj``; every rank holds the others whole."""

    q_proj: Linear | None
    q_a_proj: Linear | None
    q_b_proj: Linear | None
    q_a_norm: nn.Parameter | None
    kv_a_proj_with_mqa: Linear
    kv_b_proj: Linear
    kv_a_norm: nn.Parameter

    def __init__(self, latent: LatentAttention, shapes: ModelShapes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.names = tuple(matrix.name for matrix in latent.matrices(shapes.hidden_size, shapes.num_attention_heads))
        self.q_proj = self.q_a_proj = self.q_b_proj = self.q_a_norm = None
        for name, rows, columns, by_head in latent.matrices(shapes.hidden_size, shapes.num_attention_heads):
            setattr(self, name, Linear(rows, columns, shapes.attention_bias and not by_head, dtype, device))
        if latent.q_lora_rank:
            self.q_a_norm = nn.Parameter(torch.empty(latent.q_lora_rank, dtype=dtype, device=device))
        self.kv_a_norm = nn.Parameter(torch.empty(latent.kv_lora_rank, dtype=dtype, device=device))

    def linears(self) -> tuple[Linear, ...]:
        """Returns its linear layers in the order of ``names``."""
        return tuple(getattr(self, name) for name in self.names)

    def norms(self) -> dict[str, nn.Parameter]:
        """Returns the weights of its norms by their names in the folder."""
        return {name: norm for name, norm in (("q_a_layernorm", self.q_a_norm), ("kv_a_layernorm", self.kv_a_norm)) if norm is not None}

    def weights(self, sizes: LatentAttention, heads: int, matrices: tuple[Any, ...]) -> "LatentWeights":
        """Returns the form of the forward pass with ``matrices``, plain or packed, in the order of ``names``."""
        by_name: dict[str, Any] = dict(zip(self.names, matrices, strict=True))
        bias = lambda linear: None if linear is None else linear.bias
        return LatentWeights(
            sizes, heads, by_name.get("q_proj", by_name.get("q_b_proj")), by_name.get("q_a_proj"), bias(self.q_a_proj),
            self.q_a_norm, by_name["kv_a_proj_with_mqa"], self.kv_a_proj_with_mqa.bias, self.kv_a_norm, by_name[WITHIN_HEADS],
        )  # fmt: skip


class AbsorbedWeight(NamedTuple):
    """``kv_b_proj`` as it is multiplied head by head, each plain [Hq, N, K] or packed: ``keys`` takes a head's queries into the space of the compressed
    vector, ``values`` takes what attention returns out of it."""

    keys: Any
    values: Any


class LatentWeights(NamedTuple):
    """The plain tensors or packed weights of one layer. ``queries``: to all heads, from the compressed vector that ``q_a`` and ``q_a_norm`` make, or from the
    input where they are ``None``. ``within_heads``: ``kv_b_proj``, or its ``AbsorbedWeight``."""

    sizes: LatentAttention
    heads: int
    queries: Any
    q_a: Any
    q_a_bias: Tensor | None
    q_a_norm: Tensor | None
    kv_a: Any
    kv_a_bias: Tensor | None
    kv_a_norm: Tensor
    within_heads: Any

    def matrices(self) -> dict[str, Any]:
        """Returns its matrices by name."""
        return {name: getattr(self, name) for name in ("queries", "q_a", "kv_a", "within_heads")}

    def absorbed(self, kernels: Kernels) -> AbsorbedWeight:
        """Returns ``kv_b_proj`` by heads, with its adapter added. Called while the layer runs, because only then is a plain weight sure to be there."""
        if isinstance(self.within_heads, AbsorbedWeight):
            return self.within_heads
        return absorb(kernels, self.sizes, self.within_heads)


def absorb(kernels: Kernels, sizes: LatentAttention, weight: Tensor | AdaptedWeight) -> AbsorbedWeight:
    """Returns ``kv_b_proj`` [Hq (Dn + Dv), R] by heads. An adapter is added to the weight itself, W + scale B A, so that a head is one product."""
    plain: Tensor = weight.weight if isinstance(weight, AdaptedWeight) else weight
    if isinstance(weight, AdaptedWeight):
        (second,) = weight.second
        plain = plain + kernels.linear(second, weight.first.t().contiguous(), None).to(plain.dtype)
    by_head = plain.view(-1, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.kv_lora_rank)
    keys, values = by_head.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=1)
    return AbsorbedWeight(keys.transpose(1, 2).contiguous(), values.contiguous())


@torch.no_grad()
def pack_absorbed(kernels: Kernels, sizes: LatentAttention, weight: Tensor | AdaptedWeight) -> AbsorbedWeight:
    """Does ``absorb`` in the kernels' own layout."""
    keys, values = absorb(kernels, sizes, weight)
    return AbsorbedWeight(kernels.pack_groups(keys), kernels.pack_groups(values))
