"""Granite 3 (IBM, 2024): Llama with multipliers of the embedding, the residual stream, the attention scores and the logits."""

from typing import Any

from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.model.family import ConfigFlag, Family, Terms
from tandem.model.huggingface.config_reader import ConfigReader


def read_multipliers(reader: ConfigReader, layers: int, head_dim: int) -> dict[str, Any]:
    attention = reader.number("attention_multiplier", 1.0)
    return {
        "multipliers": Multipliers(
            reader.number("embedding_multiplier", 1.0), reader.number("residual_multiplier", 1.0),
            None if attention == head_dim**-0.5 else attention, reader.number("logits_scaling", 1.0),
        )
    }  # fmt: skip


def write_multipliers(shapes: ModelShapes) -> dict[str, Any]:
    own = shapes.multipliers
    return {
        "embedding_multiplier": own.embedding,
        "residual_multiplier": own.residual,
        "attention_multiplier": shapes.attention_scale,
        "logits_scaling": own.logits_scaling,
    }


FAMILY = Family(
    model_type="granite",
    class_name="GraniteForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
    terms=Terms(read_multipliers, write_multipliers),
    max_position_embeddings=2048,
)
