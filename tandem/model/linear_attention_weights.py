"""The parameters of one layer's linear attention, and the form of them that the forward pass uses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.layout.linear_attention import LinearAttention
from tandem.model.linear import Linear

VECTORS = {"decay_bias": "dt_bias", "decay_log": "A_log", "convolution": "conv1d.weight", "norm": "norm.weight"}
"""The parameters that are no matrices, and their names in the folder after ``linear_attn.``."""


class LinearAttentionProjections(nn.Module):
    """The matrices before the output's, by their names in the folder. ``convolution[C, 1, K]``; ``decay_bias`` and ``decay_log`` [Hv]; ``norm[Dv]``, of each
    head's output, which multiplies with its weights also where the model's others multiply with 1 plus them."""

    def __init__(self, sizes: LinearAttention, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = sizes
        (_, into, _, _), (_, gates, _, _), _ = sizes.matrices(hidden)
        self.in_proj_qkvz = Linear(into, hidden, False, dtype, device)
        self.in_proj_ba = Linear(gates, hidden, False, dtype, device)
        empty = lambda *shape: nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.convolution = empty(sizes.mixed_size, 1, sizes.kernel_size)
        self.decay_bias, self.decay_log, self.norm = empty(sizes.num_value_heads), empty(sizes.num_value_heads), empty(sizes.value_head_dim)

    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj_qkvz, self.in_proj_ba

    def vectors(self) -> dict[str, nn.Parameter]:
        """Returns the other parameters by their names in the folder."""
        return {there: getattr(self, here) for here, there in VECTORS.items()}

    def weights(self, qkvz: Any, ba: Any) -> "LinearAttentionWeights":
        """Returns the form of the forward pass with plain or packed matrices."""
        return LinearAttentionWeights(self.sizes, qkvz, ba, self.convolution, self.decay_bias, self.decay_log, self.norm)


class LinearAttentionWeights(NamedTuple):
    """The plain tensors or packed weights of one layer. ``qkvz``: for each key head its query, its key, the values of its value heads and their gates; ``ba``:
    for each key head the logits of beta of its value heads, and those of their decays."""

    sizes: LinearAttention
    qkvz: Any
    ba: Any
    convolution: Tensor
    decay_bias: Tensor
    decay_log: Tensor
    norm: Tensor
