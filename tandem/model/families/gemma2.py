"""Gemma 2 (Google DeepMind, 2024): Gemma with soft caps of attention scores and logits, windows in every second layer, and norms before and after."""

from typing import Any

from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.model.family import ConfigFlag, Family, Terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import windows_by_type

SCORE_CAP, LOGIT_CAP = 50.0, 30.0
QUERY_SCALAR = 256.0


def read_caps(reader: ConfigReader, score_cap: float | None, logit_cap: float | None) -> dict[str, float | None]:
    """Reads the soft caps; null means none, a missing key the default."""
    given = (("score_cap", "attn_logit_softcapping", score_cap), ("logit_cap", "final_logit_softcapping", logit_cap))
    return {field: None if reader.config.get(key, default) is None else reader.number(key, default) for field, key, default in given}


def read_query_scale(reader: ConfigReader, head_dim: int) -> Multipliers:
    """Reads ``query_pre_attn_scalar``, the number whose inverse square root scales the attention scores: that of another head size than the model's own."""
    scale = reader.number("query_pre_attn_scalar", QUERY_SCALAR) ** -0.5
    return Multipliers(attention=None if scale == head_dim**-0.5 else scale)


def write_terms(shapes: ModelShapes) -> dict[str, Any]:
    scalar = shapes.attention_scale**-2
    whole = round(scalar)
    return {
        "query_pre_attn_scalar": whole if whole**-0.5 == shapes.attention_scale else scalar,
        "attn_logit_softcapping": shapes.score_cap,
        "final_logit_softcapping": shapes.logit_cap,
    }


FAMILY = Family(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    post_norms=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    norms_from_one=True,
    scaled_embedding=True,
    terms=Terms(
        lambda reader, layers, head_dim: read_caps(reader, SCORE_CAP, LOGIT_CAP) | {"multipliers": read_query_scale(reader, head_dim)},
        write_terms,
        lambda layers: {"score_cap": SCORE_CAP, "logit_cap": LOGIT_CAP},
    ),
    mask=windows_by_type(default=4096, full_every=2),
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
