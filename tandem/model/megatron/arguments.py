"""The ``args`` of a Megatron checkpoint that describe the network."""

from argparse import Namespace
from typing import Any

import torch

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.families import mixtral, qwen3_moe
from tandem.model.megatron.layout import MegatronMesh, padded_vocabulary
from tandem.types import UserError


def arguments_of(shapes: ModelShapes, mesh: MegatronMesh, dtype: torch.dtype, iteration: int) -> Namespace:
    """Returns the ``args`` of a checkpoint of ``shapes`` written by ``mesh``."""
    arguments: dict[str, Any] = {
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
        "iteration": iteration, "num_experts": None, "window_size": None,
        "virtual_pipeline_model_parallel_size": mesh.virtual if mesh.virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": shapes.num_hidden_layers // mesh.stages if mesh.virtual > 1 else None,
    }  # fmt: skip
    windows = [shapes.window(layer) for layer in range(shapes.num_hidden_layers)]
    window = next((window for window in windows if window is not None), None)
    if window is not None:
        # Megatron counts the tokens on either side, excluding the token itself.
        arguments["window_size"] = (window - 1, 0)
        arguments["window_attn_skip_freq"] = None if None not in windows else [int(window is not None) for window in windows]
    if shapes.experts is not None:
        experts = shapes.experts
        arguments |= {
            "num_experts": experts.num_experts, "moe_router_topk": experts.num_experts_per_tok,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_router_pre_softmax": not experts.normalised,
            "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(shapes.num_hidden_layers)],
        }  # fmt: skip
    return Namespace(**arguments)


def shapes_of(arguments: Namespace | None) -> ModelShapes:
    """Returns the network that ``arguments`` describe. Raises ``UserError`` for arguments that are incomplete or not supported."""
    if arguments is None:
        raise UserError("the Megatron checkpoint has no 'args' that describe its model; give a folder with its config.json with --config")
    given = vars(arguments)
    try:
        for name, wanted in (("normalization", "RMSNorm"), ("swiglu", True), ("position_embedding_type", "rope")):
            if given.get(name, wanted) != wanted:
                raise UserError(f"the Megatron checkpoint has {name} {given[name]!r}; only {wanted!r} is supported")
        heads, hidden = int(given["num_attention_heads"]), int(given["hidden_size"])
        count, biased, normed = given.get("num_experts") or 0, bool(given.get("add_qkv_bias")), bool(given.get("qk_layernorm"))
        windows = _windows(given)
        architecture = "mistral" if windows else "llama"
        experts = None
        if count:
            architecture = "qwen3_moe" if normed else "mixtral"
            frequency = given.get("moe_layer_freq", 1)
            layers = range(int(given["num_layers"]))
            sparse = [bool(frequency[i]) if isinstance(frequency, list) else i % int(frequency) == 0 for i in layers]
            experts = ExpertShapes(
                int(count), int(given["moe_router_topk"]), int(given.get("moe_ffn_hidden_size") or given["ffn_hidden_size"]),
                not given.get("moe_router_pre_softmax", False), tuple(i for i in layers if not sparse[i]),
                qwen3_moe.NAMES if normed else mixtral.NAMES,
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
            qk_norm=normed, layer_windows=windows, experts=experts,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the 'args' of the Megatron checkpoint do not describe its model ({error}); give its config.json with --config") from None


def _windows(given: dict[str, Any]) -> tuple[int | None, ...]:
    """Returns each layer's window, ``()`` if all attention is full. ``window_attn_skip_freq``: every n-th layer has full attention, or a
    list with a 1 for each layer that has the window."""
    layers, frequency = range(int(given["num_layers"])), given.get("window_attn_skip_freq")
    if given.get("window_size") is None:
        return ()
    before, after = map(int, given["window_size"])
    if before < 0:
        return ()
    if after > 0:
        raise ValueError(f"window_size {given['window_size']} looks at later tokens")
    if frequency is None:
        frequency = [1 for _ in layers]
    sliding = [bool(frequency[i]) if isinstance(frequency, list) else (i + 1) % int(frequency) != 0 for i in layers]
    return tuple(before + 1 if each else None for each in sliding) if any(sliding) else ()


def mesh_of(arguments: Namespace) -> MegatronMesh:
    """Returns the ranks that wrote the checkpoint."""
    sizes = (getattr(arguments, f"{axis}_model_parallel_size", 1) or 1 for axis in ("tensor", "pipeline", "expert", "virtual_pipeline"))
    return MegatronMesh(*map(int, sizes))
