"""A packed decoder's layers as the kernels' program of dense layers (``kernels.dense_layers``), which computes them in one call."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from tandem.kernels.api import Kernels, PackedWeight
from tandem.kernels.decode_step import DecodeEnds, DecodeProgram, DecodeRows, decode_program
from tandem.kernels.dense_layers import DenseLayer, DenseOutput, DenseProduct, DenseProgram, dense_program
from tandem.kernels.quantized import PackedQuantized
from tandem.layout.shapes import ModelShapes
from tandem.model.embedding_scale import embedding_factor
from tandem.model.layer import factor_of_norm
from tandem.model.layer_weights import LayerWeights, Written

_AS_IT_IS = DenseOutput(None, 1.0)


class PackedLayers(list[LayerWeights]):
    """A decoder's packed layers, with their program: other weights are another list, so that a program never reads weights that are no longer there, nor keeps
    them."""

    def __init__(self, layers: Iterable[LayerWeights]) -> None:
        super().__init__(layers)
        self._made_of: tuple[object, object] = (None, None)
        self._program: DenseProgram | None = None
        self._decode_made_of: tuple[int, ...] = ()
        self._decode_keeps: tuple[object, ...] = ()
        self._decode_program: DecodeProgram | None = None

    def program(
        self, kernels: Kernels, norm: Tensor, norms_from_one: bool, tables: tuple[Tensor, ...], order: Tensor | None
    ) -> DenseProgram | None:
        """Returns the program of these layers and the last norm's weight ``norm[H]``, with ``model.rotary.rotary_tables`` in the ``rotary_order``; ``None``
        where the kernels have none for them."""
        if self._made_of[0] is not norm or self._made_of[1] is not tables:
            dense = [dense_layer(weights, tables) for weights in self] if order is None else [None]
            known = [layer for layer in dense if layer is not None]
            self._program = dense_program(kernels, known, factor_of_norm(norm, norms_from_one)) if len(known) == len(dense) else None
            self._made_of = norm, tables
        return self._program

    def decode_program(
        self, program: DenseProgram, embedding: Tensor | PackedWeight, head: PackedWeight | PackedQuantized, shapes: ModelShapes, rows: DecodeRows
    ) -> DecodeProgram | None:
        """Returns ``program`` with ``embedding`` and ``head`` of a model of ``shapes`` as that of a step of ``rows``; ``None`` where the kernels have none."""
        # Other weights may be put in the place of an embedding's, which stays the same parameter.
        address = embedding.data.data_ptr() if isinstance(embedding, PackedWeight) else embedding.data_ptr()
        made_of = (*map(id, (program, embedding, head, rows)), address)
        if made_of != self._decode_made_of:
            factor, scaling = embedding_factor(shapes, embedding.data.dtype), 1.0 / shapes.multipliers.logits_scaling
            self._decode_program = decode_program(program, DecodeEnds(embedding, factor, head, scaling, shapes.logit_cap), rows)
            self._decode_made_of, self._decode_keeps = made_of, (program, embedding, head, rows)
        return self._decode_program


def dense_layer(weights: LayerWeights, tables: Sequence[Tensor]) -> DenseLayer | None:
    """Returns ``weights`` as a dense layer; ``None`` if they have something that it cannot say."""
    attention, products = weights.attention, _products(weights)
    has_own = weights.experts is not None or weights.latent is not None or weights.linear_attention is not None or weights.norms_from_one
    has_own = has_own or attention.norms_apart or attention.gated or weights.summed_output_bias is not None or weights.summed_down_bias is not None
    if products is None or weights.input_norm is None or has_own:
        return None
    outputs = [_AS_IT_IS, _AS_IT_IS] if weights.written is None else [_output(written) for written in weights.written]
    return DenseLayer(
        attention.heads, *products, weights.activation, weights.input_norm, weights.mlp_norm, attention.q_norm, attention.k_norm, attention.eps,
        attention.centred_norms, tables[attention.rotation], attention.scale, attention.window, attention.cap, attention.sinks, outputs[0], outputs[1],
        weights.parallel_blocks,
    )  # fmt: skip


def _products(weights: LayerWeights) -> tuple[DenseProduct, DenseProduct, DenseProduct, DenseProduct] | None:
    qkv, output = DenseProduct(weights.qkv, weights.qkv_bias), DenseProduct(weights.output, weights.output_bias)
    gate_up, down = DenseProduct(weights.gate_up, weights.gate_up_bias), DenseProduct(weights.down, weights.down_bias)
    matrices = qkv, output, gate_up, down
    return matrices if all(isinstance(matrix.weight, PackedWeight | PackedQuantized) for matrix in matrices) else None


def _output(written: Written) -> DenseOutput:
    return DenseOutput(written.norm, written.factor)
