"""Bytes of a model's parts, as plain arithmetic. Imports no torch."""

import math
from typing import Literal

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import is_of_adapter, linear_matrices, parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, local_parameters
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.kv_cache import KVCacheDtype

_CODED_BLOCK, _FEWEST_CODED = 256, 4096
_MXFP4_BLOCK = 32
_GROUPS = {"nf4": (64, 1), "int4": (128, 2)}
"""Columns of a group of a quantized matrix, and the numbers that describe the group."""


def weight_bytes(shapes: ModelShapes, dtype: str, tensor_parallel: int = 1, rank: int = 0) -> int:
    """Bytes of the parameters that one tensor-parallel rank holds; those beside an adapter may be quantized."""
    if shapes.lora is not None and shapes.lora.quantization != "none":
        kind, matrices = shapes.lora.quantization, {f"{matrix}.weight" for matrix in linear_matrices(shapes)}
        local = local_parameters(shapes, ShardSpec(rank, tensor_parallel))
        return sum(quantized_bytes(p.shape, kind) if p.name in matrices else p.numel * DTYPE_BYTES[dtype] for p in local)
    if tensor_parallel == 1:
        return parameter_count(shapes) * DTYPE_BYTES[dtype]
    return sum(p.numel for p in local_parameters(shapes, ShardSpec(rank, tensor_parallel))) * DTYPE_BYTES[dtype]


def quantized_bytes(shape: tuple[int, ...], kind: Literal["nf4", "int4"]) -> int:
    """Bytes of a matrix in 4 bits, with an fp32 scale for each group of a row's columns, and with ``int4`` an fp32 zero."""
    (rows, columns), (group, values) = shape, _GROUPS[kind]
    return rows * columns // 2 + 4 * values * rows * -(-columns // group)


def mxfp4_engine_bytes(shapes: ModelShapes, dtype: str) -> int:
    """Bytes of the weights of an engine that keeps routed experts in MXFP4 (4 bits, and a byte for 32 columns of a row) and the rest in ``dtype``."""
    layers, coded = _layers_with_experts(shapes), 0
    for each in layers:
        for rows, columns in ((2 * each.intermediate_size, shapes.hidden_size), (shapes.hidden_size, each.intermediate_size)):
            coded += each.num_experts * rows * (columns // 2 + -(-columns // _MXFP4_BLOCK))
    return weight_bytes(shapes, dtype) - DTYPE_BYTES[dtype] * sum(_routed_numbers(shapes, each) for each in layers) + coded


def mxfp4_load_bytes(shapes: ModelShapes, dtype: str) -> int:
    """Bytes that such an engine takes besides while it reads its folder: all tensors decoded to 16 bits, and the experts of one layer in ``dtype``."""
    layer = max(_routed_numbers(shapes, each) for each in _layers_with_experts(shapes))
    return 2 * parameter_count(shapes.exported) + DTYPE_BYTES[dtype] * layer


def _layers_with_experts(shapes: ModelShapes) -> list[ExpertShapes]:
    return [experts for layer in range(shapes.num_hidden_layers) if (experts := shapes.experts_of(layer)) is not None]


def _routed_numbers(shapes: ModelShapes, experts: ExpertShapes) -> int:
    """The numbers of the matrices of one layer's routed experts."""
    return 3 * experts.num_experts * experts.intermediate_size * shapes.hidden_size


def trained_bytes(shapes: ModelShapes, dtype: str, tensor_parallel: int = 1) -> int:
    """Bytes of those of ``weight_bytes`` that training changes: all, or with an adapter only the adapter's."""
    if shapes.lora is None:
        return weight_bytes(shapes, dtype, tensor_parallel)
    local = local_parameters(shapes, ShardSpec(size=tensor_parallel))
    return sum(p.numel for p in local if is_of_adapter(p.name)) * DTYPE_BYTES[dtype]


def kv_bytes_per_token(shapes: ModelShapes, dtype: str, kv_cache_dtype: KVCacheDtype = "auto") -> int:
    """Bytes of keys and values that one token takes in the cache of a model of ``dtype``, over all layers: numbers, and with
    8 bits or fewer an fp32 scale for each head. Of latent attention, those of its compressed vector, with one scale."""
    codes = {"int8": 1.0, "fp8_e4m3": 1.0, "int4": 0.5}
    each = codes[kv_cache_dtype] if kv_cache_dtype in codes else DTYPE_BYTES[dtype if kv_cache_dtype == "auto" else kv_cache_dtype]
    scale = 4 if kv_cache_dtype in codes else 0
    if shapes.latent is not None:
        return shapes.num_hidden_layers * int(shapes.latent.cached_size * each + scale)
    return 2 * shapes.cached_layers * int(shapes.key_value_size * each + shapes.num_key_value_heads * scale)


def state_bytes(shapes: ModelShapes) -> int:
    """Bytes that layers with linear attention keep of one running sequence, however long it is."""
    return 0 if shapes.linear_attention is None else len(shapes.linear_attention.layers) * shapes.linear_attention.state_bytes


def cached_bytes_per_token(shapes: ModelShapes, dtype: str, kv_cache_dtype: KVCacheDtype = "auto", finds_prefixes: bool = True) -> int:
    """Bytes that one token takes in the cache: its keys and values, and in an engine that ``finds_prefixes`` as much for ``state_snapshots``."""
    return kv_bytes_per_token(shapes, dtype, kv_cache_dtype) * (2 if shapes.linear_attention is not None and finds_prefixes else 1)


def state_snapshots(shapes: ModelShapes, kv_cache_bytes: int) -> int:
    """Returns how many snapshots of the states of linear attention a prefix cache has beside keys and values of ``kv_cache_bytes``: those that take as much
    memory, and at least one."""
    return 0 if shapes.linear_attention is None else max(1, kv_cache_bytes // state_bytes(shapes))


def optimizer_bytes(shapes: ModelShapes, optimizer: str = "adamw", dtype: str = "float32") -> int:
    """Returns the bytes of an optimizer's state: two moments of each parameter, in the ``dtype`` of the weights, with ``adamw``; one of the
    layers' matrices with ``muon``; and with ``adamw8bit`` (of fp32 weights) two moments in 8 bits with an fp32 scale for every 256 of them, the
    embedding, the head and whatever is small excepted."""
    itemsize = DTYPE_BYTES[dtype]
    if optimizer == "adamw":
        return 2 * trained_bytes(shapes, dtype)
    held = held_parameters(shapes)
    if optimizer == "muon":
        return sum(itemsize * count * (1 if is_hidden else 2) for count, is_hidden in held)
    return sum(2 * (count + 4 * -(-count // _CODED_BLOCK)) if is_hidden and count >= _FEWEST_CODED else 8 * count for count, is_hidden in held)


def cut_by_zero(weights: int, moments: int, ranks: int, stage: int, gradients: int | None = None) -> int:
    """Returns the bytes of weights, gradients and moments on one of ``ranks`` from one backward pass to the next, of the bytes that they have in
    all (``gradients`` ``None``: those of the weights). ZeRO stage 1 shards the moments, 2 the gradients too, 3 the weights too (Rajbhandari et
    al., 2020)."""
    parts = (weights, 3), (weights if gradients is None else gradients, 2), (moments, 1)
    return sum(-(-size // ranks) if stage >= from_stage else size for size, from_stage in parts)


def held_parameters(shapes: ModelShapes) -> list[tuple[int, bool]]:
    """(numbers, whether it is a matrix of a layer) of every parameter as the decoder holds it: projections stacked, but those of a draft head."""
    if shapes.own_parameters:
        return [(math.prod(shape), len(shape) == 2 and not name.startswith("lm_head.")) for name, shape in shapes.own_parameters]
    layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_hidden_layers)]
    return [(count, False) for count in held_outside_layers(shapes)] + [held for layer in layers for held in layer]


def held_outside_layers(shapes: ModelShapes) -> list[int]:
    """The numbers of the embedding, the last norm, a language-model head of its own and a value head."""
    head, held = shapes.vocab_size * shapes.hidden_size, [shapes.vocab_size * shapes.hidden_size, shapes.hidden_size]
    held += [head] if shapes.language_head and not shapes.tie_word_embeddings else []
    held += [shapes.num_labels * shapes.hidden_size] if shapes.value_head != "none" else []
    return held + ([shapes.num_labels] if shapes.value_head == "token" else [])


def held_by_layer(shapes: ModelShapes, layer: int) -> list[tuple[int, bool]]:
    """``held_parameters`` of one layer."""
    hidden, inner = shapes.hidden_size, shapes.intermediate_size
    held = [(hidden, False) for _ in shapes.layer_norms]
    linear = shapes.linear_attention_of(layer)
    if linear is None:
        held += _held_by_attention(shapes)
    else:
        held += [(math.prod(shape), len(shape) == 2) for _, shape in linear.parameters(hidden)]
    experts = shapes.experts_of(layer)
    if experts is not None:
        matrix = experts.num_experts * hidden * experts.intermediate_size
        held += [(experts.num_experts * hidden, False), (2 * matrix, True), (matrix, True)]
        shared = hidden * experts.shared_intermediate_size
        held += [(2 * shared, True), (shared, True)] if shared else []
        held += [(hidden, False)] if experts.shared_gate else []
        held += [(experts.num_experts, False)] if experts.sigmoid is not None else []
        if experts.biased:
            held += [(experts.num_experts * size, False) for size in (1, 2 * experts.intermediate_size, hidden)]
    else:
        into = (shapes.mlp_matrices - 1) * inner
        held += [(into * hidden, True), (inner * hidden, True)]
        held += [(into, False), (hidden, False)] if shapes.mlp_bias else []
    return held


def _held_by_attention(shapes: ModelShapes) -> list[tuple[int, bool]]:
    held = [(matrix.outputs * matrix.inputs, True) for matrix in shapes.attention_matrices]
    held += [(math.prod(shape), False) for shape in shapes.qk_norm_shapes]
    if shapes.latent is None:
        held += [(shapes.qkv_rows, False)] if shapes.attention_bias else []
    else:
        held += [(size, False) for _, size in shapes.latent.norms]
        held += [(matrix.outputs, False) for matrix in shapes.attention_matrices[:-1] if shapes.attention_bias and not matrix.by_head]
    held += [(shapes.hidden_size, False)] if shapes.output_bias else []
    return held + ([(shapes.num_attention_heads, False)] if shapes.attention_sinks else [])
