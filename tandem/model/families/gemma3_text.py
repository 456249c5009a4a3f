"""Gemma 3 (Google DeepMind, 2025), its text model: Gemma 2 with norms of queries and keys in place of the caps, and windows in five of six layers, whose
rotary embedding has a base of its own."""

from typing import Any

from tandem.layout.shapes import ModelShapes
from tandem.model.families.gemma2 import read_caps, read_query_scale, write_terms
from tandem.model.family import ConfigFlag, Family, Terms
from tandem.model.sliding_windows import windows_by_type

LOCAL_THETA = 1e4


def write_with_local_base(shapes: ModelShapes) -> dict[str, Any]:
    theta = shapes.rope_theta if shapes.window_rotary is None else shapes.window_rotary.theta
    return write_terms(shapes) | {"rope_local_base_freq": theta}


FAMILY = Family(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    other_classes="Gemma3Text",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    qk_norm=True,
    post_norms=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    norms_from_one=True,
    scaled_embedding=True,
    terms=Terms(
        lambda reader, layers, head_dim: read_caps(reader, None, None) | {"multipliers": read_query_scale(reader, head_dim)}, write_with_local_base
    ),
    rotary_by_window=True,
    window_rope_theta=LOCAL_THETA,
    mask=windows_by_type(default=4096, full_every=6, pattern="sliding_window_pattern"),
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
