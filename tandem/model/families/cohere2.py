"""Command R7B and Command A (Cohere, 2024): Command R with windows in three of four layers, and no rotary embedding in the others."""

from dataclasses import replace
from typing import Any

from tandem.model.families import cohere
from tandem.model.family import Terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import Windows, windows_by_type

WINDOW, FULL_EVERY = 4096, 4
MASK = windows_by_type(default=WINDOW, full_every=FULL_EVERY, pattern="sliding_window_pattern")


def read_terms(reader: ConfigReader, layers: int, head_dim: int) -> dict[str, Any]:
    if (hidden := reader.integer("hidden_size")) != head_dim * reader.integer("num_attention_heads"):
        raise reader.fail("head_dim", head_dim, f"it must be hidden_size {hidden} over num_attention_heads")
    has_windows = "sliding_attention" in (reader.config.get("layer_types") or ["sliding_attention"])
    if has_windows and reader.config.get("sliding_window", WINDOW) is None:
        raise reader.fail("sliding_window", None, "the layers of the kind sliding_attention need a number of tokens")
    return cohere.read_logit_scale(reader) | {"unrotated_layers": without_window(MASK.read(reader, layers), layers)}


def without_window(windows: Windows, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if not windows or windows[layer] is None)


def new_terms(layers: int) -> dict[str, Any]:
    windows = tuple(WINDOW if (layer + 1) % FULL_EVERY else None for layer in range(layers))
    return {"multipliers": cohere.MULTIPLIERS, "layer_windows": windows, "unrotated_layers": without_window(windows, layers)}


FAMILY = replace(
    cohere.FAMILY,
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    mask=MASK,
    terms=Terms(read_terms, cohere.write_logit_scale, new_terms),
    rope_theta=1e4,
)
