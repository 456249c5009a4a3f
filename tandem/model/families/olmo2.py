"""OLMo 2 (Walsh et al., 2025): norms of the outputs of attention and MLP instead of their inputs, and of queries and keys over all heads."""

from tandem.model.family import ConfigFlag, Family

FAMILY = Family(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    qk_norm=True,
    qk_norm_all_heads=True,
    pre_norms=False,
    post_norms=True,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
