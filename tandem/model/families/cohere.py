"""Command R (Cohere, 2024): LayerNorm without biases, attention and MLP side by side, and a scale of the logits; in Command R+ norms of queries and keys
with weights for each head."""

from typing import Any

from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.model.family import ConfigFlag, Family, Terms
from tandem.model.huggingface.config_reader import ConfigReader

LOGIT_SCALE = 0.0625
MULTIPLIERS = Multipliers(logits_scaling=1.0 / LOGIT_SCALE)


def read_logit_scale(reader: ConfigReader) -> dict[str, Any]:
    """Reads ``logit_scale``, which logits are multiplied with, and refuses what a folder of Cohere's may say and no model of transformers does."""
    for key in ("use_parallel_block", "use_gated_activation"):
        reader.only(key, True)
    reader.only("position_embedding_type", "rope_gptj")
    return {"multipliers": Multipliers(logits_scaling=1.0 / reader.number("logit_scale", LOGIT_SCALE))}


def read_terms(reader: ConfigReader, layers: int, head_dim: int) -> dict[str, Any]:
    with_norms = reader.boolean("use_qk_norm", False)
    return read_logit_scale(reader) | {"qk_norm": with_norms, "qk_norm_by_head": with_norms}


def write_logit_scale(shapes: ModelShapes) -> dict[str, Any]:
    return {"logit_scale": 1.0 / shapes.multipliers.logits_scaling}


FAMILY = Family(
    model_type="cohere",
    class_name="CohereForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    rotary_interleaved=True,
    terms=Terms(
        read_terms,
        lambda shapes: write_logit_scale(shapes) | {"use_qk_norm": shapes.qk_norm_by_head},
        lambda layers: {"multipliers": MULTIPLIERS},
    ),
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    tie_word_embeddings=True,
    centred_norms=True,
    parallel_blocks=True,
    norm_eps_key="layer_norm_eps",
)
