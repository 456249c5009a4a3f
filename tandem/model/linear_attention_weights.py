"""The parameters of one layer's linear attention, and the form of them that the forward pass uses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.layout.linear_attention import LinearAttention
from tandem.model.linear import Linear

VECTORS = {"decay_bias": "dt_bias", "decay_log": "A_log", "convolution": "conv1d.weight", "norm": "norm.weight"}
"""The parameters that are no matrices, and their names in the folder after ``linear_attn.``."""


class LinearAttentionProjections(nn.Module):
    """The matrices before the output's, by their names in the folder, and the rest of the parameters of the heads of one tensor-parallel rank: ``decay_bias``
    and ``decay_log`` [Hv]; ``convolution[C, 1, K]``, of all heads of the model; ``norm[Dv]``, of each
    head's output, which multiplies with its weights also where the model's others multiply with 1 plus them."""

    def __init__(self, whole: LinearAttention, hidden: int, dtype: torch.dtype, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.sizes = sizes = whole.of_one_rank(ranks)
        self.channels = whole.channels(rank, ranks) if ranks > 1 else None
        (_, into, _, _), (_, gates, _, _), _ = sizes.matrices(hidden)
        self.in_proj_qkvz = Linear(into, hidden, False, dtype, device)
        self.in_proj_ba = Linear(gates, hidden, False, dtype, device)
        empty = lambda *shape: nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.convolution = empty(whole.mixed_size, 1, whole.kernel_size)
        self.decay_bias, self.decay_log, self.norm = empty(sizes.num_value_heads), empty(sizes.num_value_heads), empty(sizes.value_head_dim)

    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj_qkvz, self.in_proj_ba

    def vectors(self) -> dict[str, nn.Parameter]:
        """Returns the other parameters by their names in the folder."""
        return {there: getattr(self, here) for here, there in VECTORS.items()}

    def weights(self, qkvz: Any, ba: Any) -> "LinearAttentionWeights":
        """Returns the form of the forward pass with plain or packed matrices."""
        return LinearAttentionWeights(self.sizes, qkvz, ba, self.convolution, self.decay_bias, self.decay_log, self.norm, self.channels)


class LinearAttentionWeights(NamedTuple):
    """The plain tensors or packed weights of one layer. ``qkvz``: for each key head its query, its key, the values of its value heads and their gates; ``ba``:
    for each key head the logits of beta of its value heads, and those of their decays. ``channels``: the rows of ``convolution`` of these heads (``None``:
    all)."""

    sizes: LinearAttention
    qkvz: Any
    ba: Any
    convolution: Tensor
    decay_bias: Tensor
    decay_log: Tensor
    norm: Tensor
    channels: tuple[slice, ...] | None = None

    def own_convolution(self) -> Tensor:
        """Returns the convolution [C, K] of these heads."""
        rows = self.convolution.squeeze(1)
        return rows if self.channels is None else torch.cat([rows[part] for part in self.channels])
