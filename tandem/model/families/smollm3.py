"""SmolLM3 (Hugging Face, 2025): no rotary embedding in every fourth layer (Yang et al., 2025); windows, if turned on, in those layers."""

from typing import Any

from tandem.layout.shapes import ModelShapes
from tandem.model.family import ConfigFlag, Family, Terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import WINDOW_BY_LAYER, Mask, Windows

INTERVAL = 4


def unrotated_layers(layers: int, interval: int = INTERVAL) -> tuple[int, ...]:
    return tuple(range(interval - 1, layers, interval))


def read_unrotated(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Reads ``no_rope_layers``, whose entries are 1 for layers with rotary embedding, or else ``no_rope_layer_interval``."""
    listed = reader.config.get("no_rope_layers")
    if listed is None:
        return unrotated_layers(layers, reader.integer("no_rope_layer_interval", INTERVAL))
    if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
        raise reader.fail("no_rope_layers", listed, f"it must have 1 or 0, with or without rotary embedding, for each of {layers} layers")
    return tuple(layer for layer in range(layers) if not listed[layer])


def read_windows(reader: ConfigReader, layers: int) -> Windows:
    if reader.config.get("layer_types") is not None:
        return WINDOW_BY_LAYER.read(reader, layers)
    if not reader.boolean("use_sliding_window", False) or reader.config.get("sliding_window") is None:
        return ()
    without = read_unrotated(reader, layers)
    return tuple(reader.integer("sliding_window") if layer in without else None for layer in range(layers)) if without else ()


def write_unrotated(shapes: ModelShapes) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer not in shapes.unrotated_layers) for layer in range(shapes.num_hidden_layers)]}


FAMILY = Family(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
    mask=Mask(read_windows, WINDOW_BY_LAYER.write),
    terms=Terms(
        lambda reader, layers, head_dim: {"unrotated_layers": read_unrotated(reader, layers)},
        write_unrotated,
        lambda layers: {"unrotated_layers": unrotated_layers(layers)},
    ),
    num_key_value_heads=4,
    rope_theta=2e6,
    tie_word_embeddings=True,
)
