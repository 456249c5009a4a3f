"""Checks whether a model can be laid out on a mesh, before any process starts. Imports no torch."""

import math

from tandem.config.parallel import ParallelConfig
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, vocabulary_part
from tandem.types.errors import UserError


def check_layout(shapes: ModelShapes, parallel: ParallelConfig, *, repeats_heads: bool = False) -> None:
    """Raises ``UserError``, naming the setting, its value and the model's size, if ``parallel`` does not divide the model. ``repeats_heads``: several
    tensor-parallel ranks may have the same key-value head."""
    tensor, expert, experts = parallel.tensor, parallel.expert, shapes.experts
    if shapes.transformers is not None:
        divided = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context", "expert")}
        for name, size in divided.items():
            if size > 1:
                raise UserError(f"'parallel.{name}' is {size}, and a module of transformers (model.implementation) is not divided; leave it at 1")
        if parallel.zero == 3:
            raise UserError("'parallel.zero' is 3, and a module of transformers (model.implementation) has whole weights on every rank; set it to 2")
    if tensor > 1 and shapes.qk_norm_all_heads:
        raise UserError(f"'parallel.tensor' is {tensor}; this {shapes.architecture} model has norms of queries and keys over all heads: leave it at 1")
    counts = {"num_attention_heads": shapes.num_attention_heads}
    if not repeats_heads or tensor % shapes.num_key_value_heads:
        counts["num_key_value_heads"] = shapes.num_key_value_heads
    if shapes.linear_attention is not None:
        counts["linear attention's num_key_heads"] = shapes.linear_attention.num_key_heads
    if experts is None or experts.dense_layers:
        counts["intermediate_size"] = shapes.intermediate_size
    if experts is not None:
        counts["experts' intermediate_size"] = experts.intermediate_size
        if experts.shared_intermediate_size:
            counts["shared experts' intermediate_size"] = experts.shared_intermediate_size
    if parallel.deterministic:
        counts["hidden_size"] = shapes.hidden_size
    for name, count in counts.items():
        if count % tensor:
            fits = [size for size in range(1, tensor) if all(other % size == 0 for other in counts.values())]
            raise UserError(f"'parallel.tensor' is {tensor}, which does not divide the model's {name} {count}; {fits[-1]} does")
    linear, context = shapes.linear_attention, parallel.context
    if linear is not None and linear.num_key_heads % (tensor * context):
        raise UserError(
            f"'parallel.context' is {context}, which does not divide the {linear.num_key_heads // tensor} key heads of linear attention on each of {tensor} "
            f"tensor-parallel ranks; {math.gcd(context, linear.num_key_heads // tensor)} does"
        )
    if shapes.vocab_size <= vocabulary_part(shapes, ShardSpec(0, tensor)) * (tensor - 1):
        raise UserError(f"'parallel.tensor' is {tensor}, too many for the model's vocabulary of {shapes.vocab_size}")
    if parallel.pipeline * parallel.virtual_stages > shapes.num_hidden_layers:
        asked = f"'parallel.pipeline' is {parallel.pipeline}"
        if parallel.virtual_stages > 1:
            asked += f" times parallel.virtual_stages {parallel.virtual_stages}"
        raise UserError(f"{asked}; the model has {shapes.num_hidden_layers} layers, and a stage needs one")
    if expert > 1 and experts is None:
        raise UserError(f"'parallel.expert' is {expert}; this {shapes.architecture} model has no experts: leave it at 1")
    if experts is not None and experts.num_experts % expert:
        raise UserError(f"'parallel.expert' is {expert}, which does not divide the model's {experts.num_experts} experts")


def check_engine_ranks(shapes: ModelShapes, size: int, deterministic: bool, name: str) -> None:
    """Raises ``UserError`` if a model of ``shapes`` cannot be divided between ``size`` tensor-parallel ranks of an engine. ``name``: of the setting."""
    try:
        ShardSpec(0, size, deterministic).check(shapes)
    except ValueError as error:
        fix = "leave it at 1" if shapes.qk_norm_all_heads else "choose another size"
        raise UserError(f"{name} is {size}: {error}; {fix}") from None
