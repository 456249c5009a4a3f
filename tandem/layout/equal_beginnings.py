"""Where training on a CPU computes what sequences begin with in common once without a setting (``kernels.trained_layers``). Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.layout.shapes import ModelShapes
from tandem.types.kv_cache import KVCacheDtype

MOST_DISTINCT = 0.85
"""Of the tokens of a micro-batch: with more distinct ones little is saved, and every token is computed."""


def computes_beginnings_once(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, kv_cache_dtype: KVCacheDtype = "auto") -> bool:
    """Returns whether the C++ kernels compute an update of a model of ``shapes`` so, as ``model.decoder.Decoder.computes_beginnings_once`` says of the model:
    dense layers in fp32, whole on each rank, of which nothing is computed again. ``kv_cache_dtype``: the engine's, which keys and values are rounded to."""
    is_fp32 = trainer.dtype == "float32" and trainer.precision == "fp32" and kv_cache_dtype == "auto"
    is_whole = parallel.tensor == parallel.context == parallel.expert == parallel.pipeline == 1 and (parallel.zero < 3 or parallel.data == 1)
    is_plain = trainer.backend == "tandem" and trainer.recompute == "none" and trainer.offload_parameters == "none" and not trainer.share_prompts
    return is_fp32 and is_whole and is_plain and _has_plain_layers(shapes)


def _has_plain_layers(shapes: ModelShapes) -> bool:
    """Returns whether all layers are of the kind of Llama's, as ``model.trained_layers`` needs them."""
    has_other_blocks = shapes.experts is not None or shapes.latent is not None or shapes.linear_attention is not None or shapes.parallel_blocks
    has_other_norms = shapes.post_norms or not shapes.pre_norms or shapes.norms_from_one or shapes.qk_norm_all_heads or shapes.qk_norm_by_head
    has_other_attention = shapes.attention_gate or shapes.attention_sinks or shapes.rotary_interleaved or shapes.rotated_size != shapes.head_dim
    is_own = shapes.transformers is None and shapes.lora is None and not shapes.own_parameters
    return is_own and shapes.multipliers.residual == 1.0 and not (has_other_blocks or has_other_norms or has_other_attention)
