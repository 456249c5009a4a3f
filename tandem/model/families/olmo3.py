"""OLMo 3 (Ai2, 2025): OLMo 2 with windows in three of four layers, whose rotary frequencies are not scaled where those of the others are."""

from tandem.model.family import ConfigFlag, Family
from tandem.model.sliding_windows import windows_by_type

FAMILY = Family(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    qk_norm=True,
    qk_norm_all_heads=True,
    pre_norms=False,
    post_norms=True,
    rotary_by_window=True,
    mask=windows_by_type(default=4096, full_every=4),
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
)
