"""GLM-4 (Zhipu AI, 2025): Llama with norms before and after, a rotary embedding of neighbours in half of each head, and gate and up in one matrix."""

from tandem.model.family import ConfigFlag, Family

FAMILY = Family(
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    attention_bias=ConfigFlag("attention_bias", True),
    post_norms=True,
    rotary_fraction=0.5,
    rotary_interleaved=True,
    stacked=(
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ("post_self_attn_layernorm", ("post_attention_layernorm",)),
        ("post_attention_layernorm", ("pre_feedforward_layernorm",)),
        ("post_mlp_layernorm", ("post_feedforward_layernorm",)),
    ),
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-07,
)
