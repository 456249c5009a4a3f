"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases of queries, keys and values; sliding windows from a given layer on, off by default."""

from tandem.model.family import Family
from tandem.model.sliding_windows import WINDOW_BY_LAYER

FAMILY = Family(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    attention_bias=True,
    mask=WINDOW_BY_LAYER,
    num_key_value_heads=32,
)
