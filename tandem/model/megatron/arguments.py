"""The ``args`` of a Megatron checkpoint that describe the network."""

from argparse import Namespace
from typing import Any

import torch

from tandem.layout.expert_shapes import STANDARD_NAMES, ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.rotary import NO_SCALING, RopeScaling
from tandem.layout.shapes import ModelShapes
from tandem.model.families import mixtral, qwen2_moe, qwen3_moe
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
        "rotary_base": shapes.rope_theta, "rotary_percent": shapes.rotary_fraction,
        "add_bias_linear": shapes.mlp_bias, "add_qkv_bias": shapes.attention_bias,
        "qk_layernorm": shapes.qk_norm, "tensor_model_parallel_size": mesh.tensor, "pipeline_model_parallel_size": mesh.pipeline,
        "expert_model_parallel_size": mesh.expert, "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16,
        "iteration": iteration, "num_experts": None, "multi_latent_attention": shapes.latent is not None, **attention_arguments(shapes),
        "virtual_pipeline_model_parallel_size": mesh.virtual if mesh.virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": shapes.num_hidden_layers // mesh.stages if mesh.virtual > 1 else None,
    }  # fmt: skip
    if shapes.latent is not None:
        arguments |= {"kv_channels": shapes.latent.v_head_dim, "qk_layernorm": True, **latent_arguments(shapes, shapes.latent)}
    if shapes.experts is not None:
        arguments |= {"num_experts": shapes.experts.num_experts, **expert_arguments(shapes.experts, shapes.num_hidden_layers)}
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
        biased, layers, latent = bool(given.get("add_qkv_bias")), int(given["num_layers"]), _latent(given)
        normed, windows = bool(given.get("qk_layernorm")) and latent is None, _windows(given)
        unrotated = tuple(layer for layer, is_left_out in enumerate(given.get("no_rope_freq") or ()) if is_left_out)
        fraction = float(given.get("rotary_percent", 1.0))
        if given.get("num_experts"):
            architecture, experts = _experts(given, layers, latent is not None, normed)
        else:
            if latent is not None:
                raise ValueError("no supported family has latent attention without experts")
            terms = ((unrotated, "smollm3"), (normed, "qwen3"), (biased, "qwen2"), (fraction < 1, "phi3"), (windows, "mistral"))
            architecture, experts = next((name for is_so, name in terms if is_so), "llama"), None
        head_dim = int(given.get("kv_channels") or hidden // heads) if latent is None else latent.head_dim
        groups = int(given.get("num_query_groups") or heads) if given.get("group_query_attention", True) and latent is None else heads
        return ModelShapes(
            architecture, int(given.get("vocab_size") or given["padded_vocab_size"]), hidden, layers, heads, groups, head_dim, int(given["ffn_hidden_size"]),
            int(given["max_position_embeddings"]), not given.get("untie_embeddings_and_output_weights", True),
            rms_norm_eps=float(given.get("norm_epsilon", 1e-5)), rope_theta=float(given.get("rotary_base", 10000.0)),
            rope_scaling=NO_SCALING if latent is None else _yarn(given), attention_bias=biased, mlp_bias=bool(given.get("add_bias_linear", False)),
            qk_norm=normed, layer_windows=windows, experts=experts, latent=latent, unrotated_layers=unrotated,
            rotary_fraction=fraction if latent is None else 1.0, rotary_interleaved=latent is not None,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the 'args' of the Megatron checkpoint do not describe its model ({error}); give its config.json with --config") from None


def attention_arguments(shapes: ModelShapes) -> dict[str, Any]:
    """Returns the fields of Megatron's ``TransformerConfig`` for what attention has in some layers: windows, and no rotary embedding."""
    layers = range(shapes.num_hidden_layers)
    windows = [shapes.window(layer) for layer in layers]
    window = next((window for window in windows if window is not None), None)
    return {
        # Megatron counts the tokens on either side, excluding the token itself.
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": None if window is None or None not in windows else [int(each is not None) for each in windows],
        "no_rope_freq": [int(layer in shapes.unrotated_layers) for layer in layers] if shapes.unrotated_layers else None,
    }


def latent_arguments(shapes: ModelShapes, latent: LatentAttention) -> dict[str, Any]:
    """Returns the fields of Megatron's ``MLATransformerConfig`` for latent attention and its rotary embedding."""
    rope = shapes.rope_scaling
    arguments: dict[str, Any] = {
        "q_lora_rank": latent.q_lora_rank or None, "kv_lora_rank": latent.kv_lora_rank, "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim, "v_head_dim": latent.v_head_dim, "rope_type": "rope", "rotary_scaling_factor": 1.0,
    }  # fmt: skip
    if rope.kind != "yarn":
        return arguments
    # Where a folder has not both, cosines and sines have the factor of an ``mscale`` of 1.
    mscale = rope.mscale if rope.mscale and rope.mscale_all_dim else 1.0
    return arguments | {
        "rope_type": "yarn", "rotary_scaling_factor": rope.factor, "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "mscale": mscale, "mscale_all_dim": rope.mscale_all_dim,
    }  # fmt: skip


def expert_arguments(experts: ExpertShapes, layers: int) -> dict[str, Any]:
    """Returns the fields of Megatron's ``TransformerConfig`` for a mixture of experts and its routing."""
    arguments: dict[str, Any] = {
        "num_moe_experts": experts.num_experts, "moe_router_topk": experts.num_experts_per_tok, "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_router_pre_softmax": not experts.normalised and experts.sigmoid is None,
        "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(layers)],
        "moe_router_score_function": "softmax" if experts.sigmoid is None else "sigmoid",
        "moe_router_enable_expert_bias": experts.sigmoid is not None,
        "moe_shared_expert_intermediate_size": experts.shared_intermediate_size or None, "moe_shared_expert_gate": experts.shared_gate,
    }  # fmt: skip
    if (routing := experts.sigmoid or experts.softmax) is not None:
        arguments["moe_router_topk_scaling_factor"] = routing.scaling
        if routing.groups > 1:
            arguments |= {"moe_router_num_groups": routing.groups, "moe_router_group_topk": routing.groups_per_tok}
    return arguments


def _latent(given: dict[str, Any]) -> LatentAttention | None:
    if not given.get("multi_latent_attention"):
        return None
    compressed, plain, rotated, value = (int(given[name]) for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    return LatentAttention(compressed, plain, rotated, value, int(given.get("q_lora_rank") or 0))


def _yarn(given: dict[str, Any]) -> RopeScaling:
    if given.get("rope_type", "yarn") == "rope":
        return NO_SCALING
    mscale, all_dim = float(given.get("mscale", 1.0)), float(given.get("mscale_all_dim", 0.0))
    return RopeScaling(
        "yarn", float(given["rotary_scaling_factor"]), original_max_position_embeddings=int(given["original_max_position_embeddings"]),
        beta_fast=float(given.get("beta_fast", 32)), beta_slow=float(given.get("beta_slow", 1)), mscale=mscale if all_dim else 0.0, mscale_all_dim=all_dim,
    )  # fmt: skip


def _experts(given: dict[str, Any], layers: int, is_latent: bool, normed: bool) -> tuple[str, ExpertShapes]:
    """Returns a family whose mixtures are of this kind, and the experts."""
    frequency, gated = given.get("moe_layer_freq", 1), bool(given.get("moe_shared_expert_gate"))
    shared = int(given.get("moe_shared_expert_intermediate_size") or 0)
    sparse = [bool(frequency[i]) if isinstance(frequency, list) else i % int(frequency) == 0 for i in range(layers)]
    is_sigmoid = given.get("moe_router_score_function", "softmax") == "sigmoid"
    groups = int(given.get("moe_router_num_groups") or 1), int(given.get("moe_router_group_topk") or 1)
    scaling = float(given.get("moe_router_topk_scaling_factor") or 1.0)
    softmax = SoftmaxRouting(*groups, scaling)
    if is_sigmoid and not given.get("moe_router_enable_expert_bias"):
        raise ValueError("experts are chosen by sigmoid scores without a bias")
    if is_latent:
        architecture, names = "deepseek_v3" if is_sigmoid else "deepseek_v2", STANDARD_NAMES
    elif is_sigmoid:
        architecture, names = "glm4_moe", STANDARD_NAMES
    elif shared:
        architecture, names = "qwen2_moe", qwen2_moe.NAMES
    else:
        architecture, names = ("qwen3_moe", qwen3_moe.NAMES) if normed else ("mixtral", mixtral.NAMES)
    is_plain = not is_latent and not is_sigmoid
    if gated != bool(is_plain and shared) or (is_plain and softmax != SoftmaxRouting()):
        raise ValueError("no supported family has this mixture of experts")
    experts = ExpertShapes(
        int(given["num_experts"]), int(given["moe_router_topk"]), int(given.get("moe_ffn_hidden_size") or given["ffn_hidden_size"]),
        is_sigmoid or not given.get("moe_router_pre_softmax", False), tuple(i for i in range(layers) if not sparse[i]),
        names, shared, gated,
        SigmoidRouting(*groups, scaling) if is_sigmoid else None, softmax=softmax if not is_sigmoid and softmax != SoftmaxRouting() else None,
    )  # fmt: skip
    return architecture, experts


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
