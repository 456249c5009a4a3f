"""Mistral (Jiang et al., 2023): no biases; one sliding window for all layers (4,096 tokens in 7B v0.1), or null from v0.2 on."""

from tandem.model.family import Family
from tandem.model.sliding_windows import sliding_window

FAMILY = Family(
    model_type="mistral",
    class_name="MistralForCausalLM",
    mask=sliding_window(default=4096),
    num_key_value_heads=8,
    max_position_embeddings=131072,
)
