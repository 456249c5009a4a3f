"""The configuration of a language model that gets a value head in place of its own. Imports no torch."""

from pathlib import Path
from typing import Any

from tandem.layout.shapes import ModelShapes, ValueHead
from tandem.model.huggingface.model_config import ONE_LABEL, VALUE_CLASSES, class_of, read_json, read_shapes, shapes_of


def start_shapes(source: Path, head: ValueHead) -> ModelShapes:
    """Returns the shapes of the model that ``value_folder.make_value_folder`` returns."""
    given = read_shapes(source, "any")
    return shapes_of(value_config(source, head)) if given.language_head else given


def value_config(source: Path, head: ValueHead) -> dict[str, Any]:
    """Returns the ``config.json`` of the causal language model in ``source`` with a value head in place of its own."""
    config = read_json(source / "config.json") | ONE_LABEL
    config["architectures"] = [class_of(read_shapes(source)).removesuffix("ForCausalLM") + VALUE_CLASSES[head]]
    return config
