"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with q, k and v in one matrix of the folder, and gate and up."""

from tandem.model.family import Family
from tandem.model.sliding_windows import sliding_window

FAMILY = Family(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    mask=sliding_window(default=None),
    stacked=(
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ),
    rotary_fraction=1.0,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
