"""Qwen3 (Yang et al., 2025): norms of queries and keys, and a head size of its own."""

from tandem.model.family import ConfigFlag, Family
from tandem.model.sliding_windows import WINDOW_BY_LAYER

FAMILY = Family(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    qk_norm=True,
    mask=WINDOW_BY_LAYER,
    num_key_value_heads=32,
    head_dim=128,
)
