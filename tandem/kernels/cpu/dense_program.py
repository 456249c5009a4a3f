"""The program of dense layers (``kernels.dense_layers``): its description for ``dense_layers.cpp``, and the call."""

from collections.abc import Iterator, Sequence
from ctypes import Array, Structure, addressof, c_float, c_int64, c_void_p

from torch import Tensor, float32, int64

from tandem.kernels.api import KVLayer, PackedWeight, PagedBatch
from tandem.kernels.cpu.attention_calls import MAX_HEAD, batch_indices, cache_addresses, raise_for_attention, raise_for_rope
from tandem.kernels.cpu.calls import ACTIVATIONS, dense, indices, shape_error
from tandem.kernels.cpu.decode_step import CpuDecodeProgram, is_decodable
from tandem.kernels.cpu.dense_matrix import Matrix, described, has_format
from tandem.kernels.cpu.library import Library
from tandem.kernels.decode_step import DecodeEnds, DecodeRows
from tandem.kernels.dense_layers import DenseLayer, DenseProduct, LayerInputs

FP32, BF16, BF16_ROUNDED = range(3)
"""The precision of products, as in dense_layers.cpp."""
_FEWEST_TOKENS, _WORKING_BYTES = 256, 16 << 20
"""Working memory stays with its thread: of steps of more tokens than these it has at most so much."""
_IN_ROPE, _IN_ATTENTION = 10, 20


class _Layer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm", "sinks", "attention_output_norm", "mlp_output_norm", "cos_sin")),
        *((name, c_int64) for name in ("positions", "heads", "kv_heads", "head_size", "window", "activation", "is_centred", "has_parallel_blocks")),
        *((name, c_float) for name in ("eps", "scale", "cap", "attention_output_factor", "mlp_output_factor")),
    )


class _Cache(Structure):
    _fields_ = (*((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")), ("kind", c_int64), ("blocks", c_int64))


class CpuDenseProgram:
    """See ``DenseProgram``. ``precision``: of the products."""

    def __init__(self, library: Library, layers: Sequence[DenseLayer], norm: Tensor, precision: int) -> None:
        self._library, self._call = library, library.dense_layers
        self._precision = precision
        self.most_tokens = max(_FEWEST_TOKENS, _WORKING_BYTES // _row_bytes(layers))
        self._tensors = layers, norm  # what is read by address
        self._layers = (_Layer * len(layers))(*map(_described_layer, layers))
        self._caches = (_Cache * len(layers))()
        self._heads = [layer.heads for layer in layers]
        self._positions = [len(layer.cos_sin) for layer in layers if len(layer.cos_sin) > 1]
        self._at = addressof(self._layers), len(layers), addressof(self._caches), precision
        self._norm = norm.data_ptr()
        self._known: tuple[object, ...] = ()
        self._hidden = layers[0].hidden_size
        self._kept: dict[tuple[int, ...], Array[c_int64]] = {}

    def run(
        self, residual: Tensor, positions: Tensor, caches: Sequence[KVLayer], batch: PagedBatch, wanted: Tensor | None, inputs: LayerInputs | None = None
    ) -> Tensor:
        tokens, hidden = residual.shape
        residual, positions, slots = dense(residual), indices(positions, int64), indices(batch.slots, int64)
        starts, lengths, tables = batch_indices(batch)
        if positions.shape[0] != tokens:
            raise shape_error("positions", positions, f"[{tokens}]")
        if slots.shape[0] != tokens:
            raise shape_error("slots", slots, f"[{tokens}]")
        wanted = None if wanted is None else indices(wanted, int64)
        self._use(caches)
        out = residual.new_empty(tokens if wanted is None else len(wanted), hidden)
        at_wanted = (0, -1) if wanted is None else (wanted.data_ptr(), len(wanted))
        code = self._call(
            *self._at, tokens, positions.data_ptr(), slots.data_ptr(), starts.data_ptr(), lengths.data_ptr(), tables.data_ptr(), *tables.shape, *at_wanted,
            self._norm, residual.data_ptr(), out.data_ptr(), *self.kept(inputs, tokens),
        )  # fmt: skip
        if code:
            self.raise_for(code, len(caches[0].keys))
            raise IndexError(f"a wanted row is outside 0..{tokens - 1}, or there are more than {tokens}")
        return out

    def decode_program(self, ends: DecodeEnds, rows: DecodeRows) -> CpuDecodeProgram | None:
        """See ``kernels.decode_step``."""
        hidden = self._tensors[0][0].hidden_size
        # Logits are not rounded to bf16 with any precision.
        head_precision = FP32 if self._precision == FP32 else BF16
        return CpuDecodeProgram(self._library, self, ends, rows, head_precision) if is_decodable(ends, rows, hidden) else None

    def at(self, caches: Sequence[KVLayer]) -> tuple[int, ...]:
        """Returns the first arguments of calls that compute all layers over ``caches``: layers and their number, caches, precision, the last norm."""
        self._use(caches)
        return *self._at, self._norm

    def kept(self, inputs: LayerInputs | None, tokens: int) -> tuple[int, int, int]:
        """Returns the last arguments of calls that keep the ``inputs`` of layers: those layers and their number, and where they are kept."""
        if inputs is None:
            return 0, 0, 0
        layers, to = inputs
        width = max(1, len(layers)) * self._hidden
        if to.shape != (tokens, width) or not _is_dense(to) or any(not 0 <= layer < len(self._heads) for layer in layers):
            raise shape_error(f"the inputs of the layers {layers} of {len(self._heads)}", to, f"[{tokens}, {width}]")
        if layers not in self._kept:
            self._kept[layers] = (c_int64 * len(layers))(*layers)
        return addressof(self._kept[layers]), len(layers), to.data_ptr()

    def raise_for(self, code: int, blocks: int) -> None:
        """Raises what a ``code`` from 10 on of ``tandem_dense_layers`` means, with caches of ``blocks`` blocks."""
        raise_for_rope(code - _IN_ROPE, min(self._positions, default=1), blocks)
        raise_for_attention(code - _IN_ATTENTION, self._heads[0][2], blocks)

    def _use(self, caches: Sequence[KVLayer]) -> None:
        """Describes ``caches`` where they are others than in the last call."""
        first = caches[0].keys
        known = first.dtype, len(first), [x.data_ptr() for cache in caches for x in cache if x is not None]
        if known == self._known:
            return
        for own, cache, (_, kv_heads, size) in zip(self._caches, caches, self._heads, strict=False):
            kind, *addresses = cache_addresses(cache, kv_heads, size)
            own.keys, own.values, own.key_scales, own.value_scales = addresses
            own.kind, own.blocks = kind, len(cache.keys)
        self._known = known


def _row_bytes(layers: Sequence[DenseLayer]) -> int:
    """Returns the working memory that a token takes, as ``Widths`` of dense_layers.cpp but for its rounding, and as dense_matrix.cpp for quantized matrices."""
    widest = max(layer.qkv.weight.rows for layer in layers) + 2 * max(layer.output.weight.columns for layer in layers)
    gated = max((3 * layer.down.weight.columns for layer in layers if not isinstance(layer.down.weight, PackedWeight)), default=0)
    return 4 * (4 * layers[0].output.weight.rows + widest + gated)


def is_computable(layers: Sequence[DenseLayer], norm: Tensor) -> bool:
    """Returns whether ``dense_layers.cpp`` computes ``layers``: matrices in its formats and other tensors in dense fp32, whose sizes fit each other. Others are
    left to the kernels that Python calls one by one, which convert them or say what is wrong with them."""
    return bool(layers) and all(_fits(layer, layers[0].hidden_size) for layer in layers) and _is_vector(norm, layers[0].hidden_size)


def _fits(layer: DenseLayer, hidden: int) -> bool:
    heads, kv_heads, size = layer.heads
    inner = layer.down.weight.columns
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    expected = ((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)
    sized = zip(_vectors(layer), (hidden, hidden, hidden, hidden, size, size, heads), strict=True)
    return (
        all(_is_product(product, shape) for product, shape in zip(products, expected, strict=True))
        and all(vector is None or _is_vector(vector, length) for vector, length in sized)
        and (layer.mlp_norm is not None or layer.parallel_blocks)
        and _is_dense(layer.cos_sin) and layer.cos_sin.shape[1] == size and size % 2 == 0 and size <= MAX_HEAD and heads % kv_heads == 0
    )  # fmt: skip


def _vectors(layer: DenseLayer) -> Iterator[Tensor | None]:
    yield from (layer.input_norm, layer.mlp_norm, layer.attention_output.norm, layer.mlp_output.norm, layer.q_norm, layer.k_norm, layer.sinks)


def _is_product(product: DenseProduct, shape: tuple[int, int]) -> bool:
    weight, bias = product
    return (weight.rows, weight.columns) == shape and has_format(weight) and (bias is None or _is_vector(bias, weight.rows))


def _is_vector(x: Tensor, length: int) -> bool:
    return _is_dense(x) and x.shape == (length,)


def _is_dense(x: Tensor) -> bool:
    return x.dtype is float32 and x.is_cpu and x.is_contiguous()


def _described_layer(layer: DenseLayer) -> _Layer:
    at = lambda x: None if x is None else x.data_ptr()
    attention, mlp = layer.attention_output, layer.mlp_output
    return _Layer(
        *map(described, (layer.qkv, layer.output, layer.gate_up, layer.down)),
        *map(at, (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm, layer.sinks, attention.norm, mlp.norm, layer.cos_sin)),
        len(layer.cos_sin), *layer.heads, layer.window or 0, ACTIVATIONS[layer.activation], layer.centred, layer.parallel_blocks,
        layer.eps, layer.scale, layer.cap or 0.0, attention.factor, mlp.factor,
    )  # fmt: skip
