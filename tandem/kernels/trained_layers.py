"""The dense layers of a packed batch in training, in which several sequences begin with the same tokens.

What a row is depends on it and on the rows before it alone (the invariance law of ``kernels.api``), so equal beginnings are computed once. Their gradients
differ, and are summed over all tokens in the order of the batch: all results have the bits of a batch that computes every token."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.layout.shapes import Activation


class Beginnings(NamedTuple):
    """What S sequences of T tokens begin with in common. ``rows[T]`` int64: which of the U distinct tokens each token is, numbered as they first appear;
    ``first[U]`` int64: the first token that is it. ``cu_seqlens[S + 1]`` int32: of the T tokens; ``query_start[S + 1]`` int32: of the distinct ones, those that
    each sequence is the first to have."""

    rows: Tensor
    first: Tensor
    cu_seqlens: Tensor
    query_start: Tensor


class TrainedProduct(NamedTuple):
    """A matrix [N, K] and its ``bias[N]``, if it has one."""

    weight: Tensor
    bias: Tensor | None


class TrainedNorm(NamedTuple):
    """The ``weight[H]`` of a norm, which subtracts the mean first where it is ``centred``."""

    weight: Tensor
    eps: float
    centred: bool


class TrainedLayer(NamedTuple):
    """One layer with attention and a gated MLP, in the words of ``Kernels``. ``heads``: (query heads, key-value heads, head size). ``cos_sin[P, D]``: the
    table that queries and keys are rotated by; one of a single row is that of all positions."""

    heads: tuple[int, int, int]
    input_norm: TrainedNorm
    qkv: TrainedProduct
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_eps: float
    cos_sin: Tensor
    scale: float
    window: int | None
    cap: float | None
    output: TrainedProduct
    mlp_norm: TrainedNorm
    gate_up: TrainedProduct
    activation: Activation
    down: TrainedProduct

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """The tensors that have gradients, each product's weight before its bias, in the order of the forward pass."""
        return self.input_norm.weight, *self.qkv, self.q_norm, self.k_norm, *self.output, self.mlp_norm.weight, *self.gate_up, *self.down


class TrainLayers(Protocol):
    """Computes ``residual[T, H]`` at ``positions[T]`` through ``layers`` and the last ``norm`` -> [W, H] of the tokens ``wanted[W]`` int64, which ascend, or of
    all of them, with gradients by ``residual`` and all parameters. Bits are those of the kernels called one by one on every token."""

    def __call__(
        self, residual: Tensor, positions: Tensor, beginnings: Beginnings, layers: Sequence[TrainedLayer], norm: TrainedNorm, wanted: Tensor | None
    ) -> Tensor: ...


def train_layers_of(kernels: Kernels) -> TrainLayers | None:
    """Returns how ``kernels`` compute beginnings once; ``None`` if they do not."""
    # Looked up in the class: kernels that wrap others forward what they do not have, and those others would not compute what they change.
    if getattr(type(kernels), "train_layers", None) is None:
        return None
    wrapped: Any = kernels
    train_layers: TrainLayers | None = wrapped.train_layers
    return train_layers
