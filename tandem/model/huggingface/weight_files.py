"""The files of weights in a Hugging Face folder, and what their headers say before anything else of them is read. Imports no torch."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandem.layout.parameters import parameter_count, parameters
from tandem.layout.pipeline_stages import layer_of
from tandem.layout.shapes import ModelShapes
from tandem.model.family import family_named
from tandem.model.huggingface.hub import INDEX, WEIGHTS
from tandem.model.huggingface.model_config import read_json
from tandem.types import UserError

MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its library allows."""
SMALLEST = 0.25
"""Bytes of a parameter, in the smallest format that is read, of 4 bits, with room for parameters that are tied or left out."""
AT_ONCE = 2**24
"""Bytes of two tensors that are compared at once."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LFS = b"version https://git-lfs"
FURTHER_TOKENS = "mtp."
"""What the names of modules of multi-token prediction begin with that are not among the layers; transformers leaves them out too."""


class Stored(NamedTuple):
    """A tensor in the file ``path``: its ``shape`` and ``dtype``, and the bytes from ``first`` up to ``end`` of the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    first: int
    end: int


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Returns the files of weights, each with the tensors that the index lists in it; ``None``: all, as there is no index. Raises ``UserError`` for a folder
    without weights, an index that is none, or a missing file."""
    files: dict[str, list[str] | None] = {}
    if (folder / WEIGHTS).is_file():
        return {WEIGHTS: None}
    if not (folder / INDEX).is_file():
        raise UserError(f"'{folder}' has neither {WEIGHTS} nor {INDEX}; only safetensors weights are read")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"'{folder / INDEX}' has no usable weight_map; download the folder again")
    for name, shard in weight_map.items():
        names = files.setdefault(shard, [])
        assert names is not None
        names.append(name)
    for shard in files:
        if "\0" in shard or Path(shard).name != shard or not (folder / shard).is_file():
            raise UserError(f"'{folder}' has no shard '{shard}', which its index lists; download the folder again")
    return files


def read_header(path: Path) -> dict[str, Stored]:
    """Returns what the header of a safetensors file says of its tensors. Raises ``UserError`` for a file that is none."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS))
            if start == LFS:
                raise UserError(f"'{path}' is a pointer of Git LFS and not the file; run 'git lfs pull' in its folder, or download it again")
            file.seek(8)
            size = int.from_bytes(start[:8], "little")
            header = json.loads(file.read(size)) if size <= MOST_HEADER_BYTES else None
        if not isinstance(header, dict):
            raise ValueError("it has no header")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        places = {name: [8 + size + int(at) for at in entry["data_offsets"]] for name, entry in entries.items()}
        return {name: Stored(path, tuple(map(int, entry["shape"])), str(entry["dtype"]), *places[name]) for name, entry in entries.items()}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"'{path}' is broken or truncated ({_said(error)}); download it again") from None


def tensor_names(folder: str | Path) -> set[str]:
    """Returns the names of all tensors of ``folder``. Raises ``UserError`` as ``weight_files`` and ``read_header``."""
    folder = Path(folder)
    return {name for file, names in weight_files(folder).items() for name in (read_header(folder / file) if names is None else names)}


def check_weights(folder: Path, shapes: ModelShapes) -> None:
    """Compares the headers of the files in ``folder`` with its ``config.json``, of ``shapes``. Raises ``UserError`` for a file that is missing, broken or
    truncated, and for a tensor that is missing, has another shape, has no floating-point numbers, belongs to no parameter or is tied to another one and differs
    from it; of folders whose tensors are encoded or stacked, for files and their size alone."""
    listed, held = dict[str, Stored](), 0
    for file, names in weight_files(folder).items():
        path = folder / file
        header = read_header(path)
        described, size = max((tensor.end for tensor in header.values()), default=0), path.stat().st_size
        if size != described and header:
            raise UserError(f"'{path}' is broken or truncated (it has {size:,} bytes, and its header describes {described:,}); download it again")
        for name in header if names is None else names:
            if name not in header:
                raise UserError(f"'{path}' has no tensor '{name}', which its index lists; download the folder again")
            listed[name] = header[name]
        held += size
    if (count := parameter_count(shapes.exported)) * SMALLEST > held:
        raise UserError(f"model '{folder}': config.json describes {count:,} parameters, and the files of weights have {held:,} bytes; check config.json")
    config = read_json(folder / "config.json")
    if config.get("quantization_config") is None and _is_plain(shapes):
        _check_tensors(folder, shapes, listed, config)


def _is_plain(shapes: ModelShapes) -> bool:
    """Returns whether the folder of a model of ``shapes`` names its tensors as ``layout.parameters`` does."""
    if shapes.transformers is not None or shapes.value_head != "none" or not shapes.language_head:
        return False
    family = family_named(shapes.architecture)
    return not family.stacked and not (family.experts is not None and family.experts.stacked)


def _check_tensors(folder: Path, shapes: ModelShapes, listed: Mapping[str, Stored], config: Mapping[str, Any]) -> None:
    wanted = dict(parameters(shapes.exported))
    for name, shape in wanted.items():
        if name not in listed:
            raise UserError(f"model '{folder}': tensor '{name}' is missing from the weights; config.json requires it")
        if listed[name].shape != tuple(shape):
            raise UserError(f"model '{folder}': tensor '{name}' has shape {list(listed[name].shape)}; config.json requires {list(shape)}")
    further = config.get("num_nextn_predict_layers")
    layers = range(shapes.num_hidden_layers, shapes.num_hidden_layers + (further if isinstance(further, int) else 0))
    for name, tensor in listed.items():
        is_left_out = name.endswith("rotary_emb.inv_freq") or name.startswith(FURTHER_TOKENS) or layer_of(name) in layers
        if is_left_out:
            continue
        if name not in wanted and not (shapes.tie_word_embeddings and name == HEAD):
            raise UserError(f"model '{folder}': tensor '{name}' is not a parameter of this {shapes.architecture} model; check config.json")
        if not tensor.dtype.startswith(("F", "BF")):
            raise UserError(f"model '{folder}': tensor '{name}' is {tensor.dtype}; quantized weights are not supported here; use the float checkpoint")
    if shapes.tie_word_embeddings and HEAD in listed:
        check_tied_head(_differ(listed[HEAD], listed[EMBEDDING]), HEAD, EMBEDDING, f"model '{folder}': ")


def check_tied_head(differs: bool, head: str, embedding: str, where: str = "") -> None:
    """Raises ``UserError`` if a folder has the tensor ``head`` of a model that has none of its own, and it ``differs`` from its ``embedding``."""
    if differs:
        raise UserError(f"{where}tensor '{head}' differs from '{embedding}' but config.json has tie_word_embeddings true; set it to false")


def _differ(one: Stored, other: Stored) -> bool:
    """Returns whether two tensors have other bytes; of one dtype alone, as others are compared when they are read."""
    if one.dtype != other.dtype:
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.first)
        second.seek(other.first)
        return one.shape != other.shape or any(
            first.read(size := min(AT_ONCE, one.end - at)) != second.read(size) for at in range(one.first, one.end, AT_ONCE)
        )


def _said(error: Exception) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else " ".join(str(error).split())[:200]
