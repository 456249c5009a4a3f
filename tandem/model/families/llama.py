"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): full attention; biases if ``config.json`` enables them."""

from tandem.model.family import ConfigFlag, Family

FAMILY = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
    max_position_embeddings=2048,
)
