"""Bytes of a model's parts, as plain arithmetic. Imports no torch."""

from tandem.layout.shapes import ModelShapes, parameter_count
from tandem.layout.sharding import Cut, local_parameters
from tandem.types.kv_cache import KVCacheDtype

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def weight_bytes(shapes: ModelShapes, dtype: str, tensor_parallel: int = 1, rank: int = 0) -> int:
    """Bytes of the parameters that one tensor-parallel rank holds."""
    if tensor_parallel == 1:
        return parameter_count(shapes) * DTYPE_BYTES[dtype]
    return sum(p.numel for p in local_parameters(shapes, Cut(rank, tensor_parallel))) * DTYPE_BYTES[dtype]


def kv_bytes_per_token(shapes: ModelShapes, dtype: str, kv_cache_dtype: KVCacheDtype = "auto") -> int:
    """Bytes of keys and values that one token takes in the cache of a model of ``dtype``, over all layers: numbers, and with
    8 bits an fp32 scale for each head."""
    stored = {"auto": dtype, "fp8_e4m3": "int8"}.get(kv_cache_dtype, kv_cache_dtype)
    scale = 4 if kv_cache_dtype in ("int8", "fp8_e4m3") else 0
    return 2 * shapes.num_layers * (shapes.key_value_size * DTYPE_BYTES[stored] + shapes.num_kv_heads * scale)


def optimizer_bytes(shapes: ModelShapes) -> int:
    """Bytes of AdamW's two fp32 moments."""
    return 2 * 4 * parameter_count(shapes)


def activation_bytes_per_token(shapes: ModelShapes) -> int:
    """Bytes that the trainer's forward saves for one token's backward, in fp32, without checkpointing.

    Per layer: the residual stream twice, the two normed inputs, the projection q|k|v before and after rotation, the
    attention's output and log-sum-exp, gate|up and their product. In a mixture of experts every one of a token's
    experts has its own input, gate|up, product and output, beside the router's probabilities. Once: the final residual
    and its norm.
    """
    hidden = shapes.hidden_size
    total = 2 * hidden + shapes.num_layers * (4 * hidden + 2 * shapes.qkv_size + shapes.query_size + shapes.num_heads)
    for layer in range(shapes.num_layers):
        experts = shapes.experts_of(layer)
        if experts is None:
            total += 3 * shapes.intermediate_size
        else:
            total += experts.experts_per_token * (2 * hidden + 3 * experts.intermediate_size) + 2 * experts.num_experts
    return 4 * total
