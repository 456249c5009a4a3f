"""Gemma (Google DeepMind, 2024): Llama with GELU, norms that multiply with 1 plus their weights, and a scaled embedding."""

from tandem.model.family import ConfigFlag, Family

FAMILY = Family(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    activation="gelu_pytorch_tanh",
    # The name in the first folders, which transformers too takes for the approximation.
    activation_alias="gelu",
    norms_from_one=True,
    scaled_embedding=True,
    num_key_value_heads=16,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
