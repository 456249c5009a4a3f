"""Gemma 3 (Google DeepMind, 2025), its text model: Gemma 2 with norms of queries and keys in place of the caps, and windows in five of six layers, whose
rotary embedding has a base of its own."""

from dataclasses import replace
from typing import Any

from tandem.layout.shapes import ModelShapes
from tandem.model.families import gemma2
from tandem.model.family import Terms
from tandem.model.sliding_windows import windows_by_type

LOCAL_THETA = 1e4


def write_with_local_base(shapes: ModelShapes) -> dict[str, Any]:
    theta = shapes.rope_theta if shapes.window_rotary is None else shapes.window_rotary.theta
    return gemma2.write_terms(shapes) | {"rope_local_base_freq": theta}


FAMILY = replace(
    gemma2.FAMILY,
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    other_classes="Gemma3Text",
    qk_norm=True,
    terms=Terms(
        lambda reader, layers, head_dim: gemma2.read_caps(reader, None, None) | {"multipliers": gemma2.read_query_scale(reader, head_dim)},
        write_with_local_base,
    ),
    rotary_by_window=True,
    window_rope_theta=LOCAL_THETA,
    mask=windows_by_type(default=4096, full_every=6, pattern="sliding_window_pattern"),
    max_position_embeddings=131072,
    rope_theta=1e6,
)
