"""The layers of a dense decoder as plain data, for kernel sets that compute all of them in one call."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tandem.kernels.api import Kernels, KVLayer, PackedWeight, PagedBatch
from tandem.kernels.quantized import PackedQuantized
from tandem.layout.shapes import Activation


class DenseProduct(NamedTuple):
    """A packed matrix [N, K] and its ``bias[N]``, if it has one."""

    weight: PackedWeight | PackedQuantized
    bias: Tensor | None


class DenseOutput(NamedTuple):
    """What happens to the output of attention or MLP before it is added to the residual stream: a ``norm[H]``, if there is one, then a factor."""

    norm: Tensor | None
    factor: float


class DenseLayer(NamedTuple):
    """One layer with attention and a gated MLP, in the words of ``Kernels``. ``heads``: (query heads, key-value heads, head size). ``cos_sin[P, D]``: the
    table that queries and keys are rotated by; one of a single row is that of all positions. ``input_norm`` and ``mlp_norm`` [H]: before attention and MLP,
    which with ``parallel_blocks`` both read the first. ``eps``, ``centred``: of all of its norms."""

    heads: tuple[int, int, int]
    qkv: DenseProduct
    output: DenseProduct
    gate_up: DenseProduct
    down: DenseProduct
    activation: Activation
    input_norm: Tensor
    mlp_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    centred: bool
    cos_sin: Tensor
    scale: float
    window: int | None
    cap: float | None
    sinks: Tensor | None
    attention_output: DenseOutput
    mlp_output: DenseOutput
    parallel_blocks: bool

    @property
    def hidden_size(self) -> int:
        return self.qkv.weight.columns


class LayerInputs(NamedTuple):
    """Receives the inputs of ``layers``, counted from 0, side by side: ``to[T, len(layers) * H]``, dense fp32."""

    layers: tuple[int, ...]
    to: Tensor


class DenseProgram(Protocol):
    """All layers of a decoder, prepared once and then run in one call a step."""

    most_tokens: int
    """With more tokens the calls that it saves cost nothing beside the arithmetic, and its working memory would be large."""

    def run(
        self, residual: Tensor, positions: Tensor, caches: Sequence[KVLayer], batch: PagedBatch, wanted: Tensor | None, inputs: LayerInputs | None = None
    ) -> Tensor:
        """Computes ``residual[T, H]``, which it overwrites, at ``positions[T]`` -> [T, H] after the decoder's last norm, or [W, H] of the rows ``wanted[W]``;
        keys and values are written to ``caches``, and what layers read to ``inputs``. The bits are those of the kernels called one by one. No gradient."""
        ...


def dense_program(kernels: Kernels, layers: Sequence[DenseLayer], norm: Tensor) -> DenseProgram | None:
    """Returns the program of ``layers`` and the last ``norm[H]``; ``None`` if ``kernels`` have none for them."""
    # Looked up in the class: kernels that wrap others forward what they do not have, and the program of those others would not compute what they change.
    make: Any = getattr(type(kernels), "dense_program", None)
    program: DenseProgram | None = None if make is None else make(kernels, layers, norm)
    return program
