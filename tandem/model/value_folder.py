"""The folder that a value model starts from: a Hugging Face folder with a value head, or one made of a causal language model's."""

import json
import os.path
from pathlib import Path

import torch
from torch import Tensor

from tandem.layout.parameters import parameters
from tandem.layout.shapes import ValueHead
from tandem.model.huggingface.hub import INDEX, WEIGHTS
from tandem.model.huggingface.model_config import read_json, read_shapes, shapes_of
from tandem.model.huggingface.safetensors_file import write_file
from tandem.model.initialise import drawn_matrix
from tandem.model.value_config import value_config
from tandem.runtime.process.temporary import whole_folder
from tandem.text.tokenizer import TOKENIZER_FILES

HEAD_FILE = "score.safetensors"
LINK = "trunk-"
"""Prefix of the links to the files of the language model's weights."""


def make_value_folder(source: Path, head: ValueHead, seed: int, folder: Path) -> Path:
    """Returns the folder of a model with a value head: ``source`` if it has one; else ``folder``, which is written if it does not exist.

    The weights of the trunk are links to the files of ``source``, so that nothing is copied. A new head is drawn as transformers draws one: from a
    normal distribution with the ``initializer_range`` of ``config.json``, here seeded with ``seed``; its bias is 0. Raises ``UserError`` if
    ``source`` is not a model."""
    if not read_shapes(source, "any").language_head or folder.exists():
        return folder if folder.exists() else source
    config = value_config(source, head)
    shapes = shapes_of(config)
    files = _files_of(source)
    with whole_folder(folder) as written:
        weight_map = {p.name: HEAD_FILE if p.name.startswith("score.") else LINK + files.get(p.name, WEIGHTS) for p in parameters(shapes)}
        for file in {name for name in weight_map.values() if name != HEAD_FILE}:
            (written / file).symlink_to(_link(source / file.removeprefix(LINK), folder))
        write_file(written / HEAD_FILE, new_head(source, head, seed))
        for name in ("generation_config.json", *TOKENIZER_FILES):
            if (source / name).is_file():
                (written / name).write_bytes((source / name).read_bytes())
        (written / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
        (written / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def new_head(source: Path, head: ValueHead, seed: int) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a value head for the model in ``source``."""
    deviation = float(read_json(source / "config.json").get("initializer_range", 0.02))
    drawn = drawn_matrix(seed, "score.weight", (1, read_shapes(source, "any").hidden_size), deviation)
    return [("score.weight", drawn), *([("score.bias", torch.zeros(1))] if head == "token" else [])]


def _files_of(source: Path) -> dict[str, str]:
    """Returns the file of each tensor in ``source``; empty if there is only one file."""
    if (source / WEIGHTS).is_file():
        return {}
    return {str(name): str(file) for name, file in read_json(source / INDEX)["weight_map"].items()}


def _link(file: Path, folder: Path) -> str:
    """Returns what a link in ``folder`` to ``file`` says: a relative path if both are in one run's folder, which may be moved."""
    run = folder.parent.parent
    return os.path.relpath(file, folder) if file.is_relative_to(run) else str(file.resolve())
