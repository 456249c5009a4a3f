"""The keys of a ``config.json`` that change what a model computes, of all families in transformers. Imports no torch.

transformers ignores such a key in a family that does not have it, so a file with one was made for other code, or names the wrong ``model_type``.
"""

from collections.abc import Collection
from typing import Any

from tandem.model.huggingface.config_reader import ConfigReader

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # attention
    "attn_logit_softcapping": (), "attention_logit_cap": (), "query_pre_attn_scalar": (), "attention_multiplier": (), "clip_qkv": (), "alibi": (),
    "use_qk_norm": (), "qk_norm": (), "qk_layernorm": (), "use_bidirectional_attention": (), "attention_chunk_size": (),
    "attn_temperature_tuning": (), "attn_output_gate": (), "attention_out_bias": (), "q_lora_rank": (), "kv_lora_rank": (), "swa_head_dim": (),
    "attention_in_multiplier": (1,), "attention_out_multiplier": (1,), "key_multiplier": (1,), "attention_value_scale": (1,), "qk_l2_clip_threshold": (),
    "rel_l2_clip_threshold": (), "use_attention_gate": (), "attn_scale": (),
    # positions
    "no_rope_layers": (), "rope_local_base_freq": (), "rope_interleave": (), "rotary_pct": (1,), "rotary_dim": (), "use_mrope": (), "mrope_section": (),
    "full_attn_mod": (1,), "interpolate_factor": (1,), "layer_rope_theta": (),
    # layers
    "embedding_multiplier": (1,), "scale_emb": (1,), "scale_embedding": (), "residual_multiplier": (1,), "scale_depth": (), "use_parallel_residual": (),
    "parallel_attn": (), "apply_residual_connection_post_layernorm": (), "hidden_activation": ("silu",), "zero_centered_gamma": (),
    "hidden_size_per_layer_input": (), "linear_num_value_heads": (), "mamba_d_state": (), "embedding_scale": (1,), "mlp_multipliers": ([1, 1],),
    "use_post_norm": (), "use_sandwich_norm": (), "mlp_gate_softcap": (), "mlp_up_softcap": (), "activation_sparsity_pattern": (), "altup_coef_clip": (),
    "hc_mult": (1,), "ssm_in_multiplier": (1,), "ssm_out_multiplier": (1,), "ssm_multipliers": ([1, 1, 1, 1, 1],), "gate_soft_cap": (),
    "full_attn_alpha_factor": (1,), "full_attn_beta_factor": (1,), "linear_attn_alpha_factor": (1,), "linear_attn_beta_factor": (1,),
    "mlp_alpha_factor": (1,), "mlp_beta_factor": (1,),
    # heads
    "final_logit_softcapping": (), "logits_scaling": (1,), "logit_scale": (1,), "dim_model_base": (), "logits_soft_cap": (), "output_logit_soft_cap": (),
    "lm_head_multiplier": (1,), "logits_mup_width_multiplier": (1,), "chain_hidden_post_norm": (),
    # experts
    "n_shared_experts": (), "num_shared_experts": (), "shared_expert_intermediate_size": (), "shared_intermediate_size": (), "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,), "n_group": (1,), "topk_group": (1,), "first_k_dense_replace": (), "moe_layer_freq": (1,),
    "swiglu_alpha": (), "swiglu_limit": (), "route_scale": (1,), "router_scaling_factor": (1,), "moe_routed_scaling_factor": (1,), "use_expert_bias": (),
    "moe_router_logit_softcapping": (),
}  # fmt: skip
"""By key, the values beside null, false, 0 and empty with which it changes nothing."""


def _changes(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True equals 1, which is neutral as a factor and not as a switch.
    return any(map(bool, value)) and value not in neutral if isinstance(value, list) else bool(value) and (value is True or value not in neutral)


def refuse_other_terms(read: ConfigReader, family: str, understood: Collection[str]) -> None:
    """Raises ``UserError`` for the first key that changes the arithmetic and is not ``understood`` by ``family``."""
    for key, value in read.config.items():
        if key in NEUTRAL and key not in understood and _changes(value, NEUTRAL[key]):
            fix = "remove the key if the model was not trained with it, or set model.implementation to transformers, whose module may have it"
            raise read.fail(key, value, f"a {family} model here has no such term; {fix}")
