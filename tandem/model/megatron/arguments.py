"""The ``args`` of a Megatron checkpoint: what of them describes the network."""

from argparse import Namespace
from typing import Any

import torch

from tandem.layout.shapes import Architecture, ExpertShapes, ModelShapes
from tandem.model.megatron.layout import MegatronMesh, padded_vocabulary
from tandem.types import UserError


def arguments_of(shapes: ModelShapes, mesh: MegatronMesh, dtype: torch.dtype, iteration: int) -> Namespace:
    """Megatron's names for what ``shapes`` and ``mesh`` say."""
    found: dict[str, Any] = {
        "num_layers": shapes.num_hidden_layers, "hidden_size": shapes.hidden_size, "ffn_hidden_size": shapes.intermediate_size,
        "num_attention_heads": shapes.num_attention_heads,
        "group_query_attention": shapes.num_key_value_heads != shapes.num_attention_heads,
        "num_query_groups": shapes.num_key_value_heads, "kv_channels": shapes.head_dim,
        "max_position_embeddings": shapes.max_position_embeddings,
        "seq_length": shapes.max_position_embeddings, "vocab_size": shapes.vocab_size,
        "padded_vocab_size": padded_vocabulary(shapes, mesh.tensor),
        "make_vocab_size_divisible_by": 128, "untie_embeddings_and_output_weights": not shapes.tie_word_embeddings,
        "normalization": "RMSNorm", "norm_epsilon": shapes.rms_norm_eps, "swiglu": True, "position_embedding_type": "rope",
        "rotary_base": shapes.rope_theta, "rotary_percent": 1.0, "add_bias_linear": shapes.mlp_bias, "add_qkv_bias": shapes.attention_bias,
        "qk_layernorm": shapes.qk_norm, "tensor_model_parallel_size": mesh.tensor, "pipeline_model_parallel_size": mesh.pipeline,
        "expert_model_parallel_size": mesh.expert, "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16,
        "iteration": iteration, "num_experts": None,
    }  # fmt: skip
    if shapes.experts is not None:
        experts = shapes.experts
        found |= {
            "num_experts": experts.num_experts, "moe_router_topk": experts.num_experts_per_tok,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_router_pre_softmax": not experts.normalised,
            "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(shapes.num_hidden_layers)],
        }  # fmt: skip
    return Namespace(**found)


def shapes_of(arguments: Namespace | None) -> ModelShapes:
    """The network that ``arguments`` describe. Raises ``UserError`` where they do not say enough, or something that no model here
    has."""
    if arguments is None:
        raise UserError("the Megatron checkpoint has no 'args' that describe its model; name a folder with its config.json by --config")
    given = vars(arguments)
    try:
        for name, wanted in (("normalization", "RMSNorm"), ("swiglu", True), ("position_embedding_type", "rope")):
            if given.get(name, wanted) != wanted:
                raise UserError(f"the Megatron checkpoint has {name} {given[name]!r}, which no model here has; {wanted!r} is read")
        heads, hidden = int(given["num_attention_heads"]), int(given["hidden_size"])
        count, biased, normed = given.get("num_experts") or 0, bool(given.get("add_qkv_bias")), bool(given.get("qk_layernorm"))
        architecture: Architecture = "llama"
        experts = None
        if count:
            architecture = "qwen3_moe" if normed else "mixtral"
            frequency = given.get("moe_layer_freq", 1)
            layers = range(int(given["num_layers"]))
            sparse = [bool(frequency[i]) if isinstance(frequency, list) else i % int(frequency) == 0 for i in layers]
            experts = ExpertShapes(
                int(count), int(given["moe_router_topk"]), int(given.get("moe_ffn_hidden_size") or given["ffn_hidden_size"]),
                not given.get("moe_router_pre_softmax", False), tuple(i for i in layers if not sparse[i]),
            )  # fmt: skip
        elif normed:
            architecture = "qwen3"
        elif biased:
            architecture = "qwen2"
        return ModelShapes(
            architecture, int(given.get("vocab_size") or given["padded_vocab_size"]), hidden, int(given["num_layers"]), heads,
            int(given.get("num_query_groups") or heads) if given.get("group_query_attention", True) else heads,
            int(given.get("kv_channels") or hidden // heads), int(given["ffn_hidden_size"]), int(given["max_position_embeddings"]),
            not given.get("untie_embeddings_and_output_weights", True), rms_norm_eps=float(given.get("norm_epsilon", 1e-5)),
            rope_theta=float(given.get("rotary_base", 10000.0)), attention_bias=biased, mlp_bias=bool(given.get("add_bias_linear", False)),
            qk_norm=normed, experts=experts,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the 'args' of the Megatron checkpoint do not describe its model ({error}); name its config.json by --config") from None


def mesh_of(arguments: Namespace) -> MegatronMesh:
    """The ranks that wrote it, as ``arguments`` have them."""
    sizes = (getattr(arguments, f"{axis}_model_parallel_size", 1) or 1 for axis in ("tensor", "pipeline", "expert"))
    return MegatronMesh(*map(int, sizes))
