"""Converts a model from one layout of files to another, bit for bit."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tandem.backends.megatron.dist_process import Task, run_task
from tandem.layout.parameters import is_of_adapter, parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import whole_offsets
from tandem.model.huggingface.model_config import config_json, read_json, read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.safetensors_file import write_file
from tandem.model.huggingface.stacked_experts import stacks_of_folder
from tandem.model.huggingface.weight_files import check_weights
from tandem.model.megatron.arguments import shapes_of
from tandem.model.megatron.dist_files import is_dist_checkpoint, open_dist_checkpoint
from tandem.model.megatron.files import TRACKER, iteration_name, open_megatron, read_megatron, write_megatron
from tandem.model.megatron.layout import MegatronMesh, Spelling
from tandem.model.quantization.formats import decoded_blocks, is_packed_config
from tandem.runtime.process.temporary import temporary_folder
from tandem.storage.folder_manifest import write_manifest
from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Damaged, verify
from tandem.trainer.checkpoint.format.older_version import checkpoint_of_older_version, is_of_older_version
from tandem.trainer.checkpoint.format.shard import Key, Shard
from tandem.trainer.checkpoint.model_state import WEIGHTS
from tandem.trainer.checkpoint.read import Contents
from tandem.types import RunError, UserError

Layout = Literal["huggingface", "megatron", "megatron-dist", "tandem"]
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES)
INSIDE = "huggingface"
"""The folder in a Megatron checkpoint for ``config.json`` and the tokenizer, which the format does not hold."""


@dataclass(frozen=True, slots=True)
class Source:
    """A whole model: ``weights`` by Hugging Face name, ``companions`` (config and tokenizer files), and its training ``step``."""

    shapes: ModelShapes
    weights: Mapping[str, Tensor]
    companions: tuple[Path, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Converted:
    """A finished conversion of ``tensors`` tensors with ``numbers`` elements from the layout ``source`` to ``target``."""

    source: Layout
    target: Layout
    tensors: int
    numbers: int


def layout_of(folder: Path) -> Layout:
    """Returns the layout of the model in ``folder``. Raises ``UserError`` where it is not a model."""
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder; give a model or a checkpoint")
    if (folder / MANIFEST).is_file():
        return "tandem"
    if is_dist_checkpoint(folder):
        return "megatron-dist"
    if (folder / TRACKER).is_file() or any(folder.glob("mp_rank_*")):
        return "megatron"
    if (folder / "config.json").is_file():
        return "huggingface"
    if is_of_older_version(folder):
        raise UserError(_of_older_version(folder))
    if (checkpoint := checkpoint_of_older_version(folder)) is not None:
        raise UserError(f"'{folder}' is a run of an older version of Tandem; convert its model or a checkpoint, for example '{checkpoint}'")
    raise UserError(f"'{folder}' has no {MANIFEST}, no {TRACKER} and no config.json; give a model or a checkpoint")


def convert(
    source: Path, target: Path, *, of: Layout | None = None, to: Layout, mesh: MegatronMesh | None = None,
    spelling: Spelling = "transformer_engine", config: Path | None = None,
) -> Converted:
    """Writes ``source`` in the layout ``to`` as the new folder ``target``, by one atomic rename. ``config``: a folder with the ``config.json``
    (and tokenizer) that ``source`` lacks. Raises ``UserError`` where ``source`` cannot be read or divided as ``mesh`` says."""
    if target.exists():
        raise UserError(f"'{target}' exists and is not overwritten; choose another folder or remove it")
    of = of or layout_of(source)
    if of == "tandem" and is_of_older_version(source):
        raise UserError(_of_older_version(source))
    model = _READERS[of](source, config)
    mesh = mesh or MegatronMesh()
    if to == "megatron":
        mesh.check(model.shapes)
    fresh = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        if to == "megatron":
            write_megatron(fresh, model.shapes, model.weights, mesh, spelling, model.step)
            _companions(model, fresh / INSIDE)
        elif to == "megatron-dist":
            _write_dist(model, fresh)
        else:
            _write_huggingface(model, fresh)
            write_manifest(fresh)
        fresh.rename(target)
    except OSError as error:
        raise RunError(f"'{target}' cannot be written: {error.strerror or error}; make room or name another folder") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Converted(of, to, len(model.weights), sum(tensor.numel() for tensor in model.weights.values()))


def _write_huggingface(model: Source, folder: Path) -> None:
    write_file(folder / "model.safetensors", stacks_of_folder(model.shapes).join((name, model.weights[name]) for name, _ in parameters(model.shapes)))
    _companions(model, folder)


def _write_dist(model: Source, folder: Path) -> None:
    """Fills ``folder`` with a distributed checkpoint, which the Megatron sidecar writes from a Hugging Face folder in a temporary place."""
    with temporary_folder() as scratch:
        given = scratch / "model"
        given.mkdir()
        _write_huggingface(model, given)
        run_task(Task("write", str(given), str((folder / iteration_name(model.step)).absolute()), model.step), scratch)
    _companions(model, folder / INSIDE)
    (folder / TRACKER).write_text(f"{model.step or 'release'}\n", encoding="ascii")


def _of_older_version(folder: Path) -> str:
    # Such a checkpoint has the weights of a Hugging Face folder and, usually, its config.
    fix = "give --from huggingface, which reads its weights" if (folder / "config.json").is_file() else "convert it with that version"
    return f"the checkpoint '{folder}' was written by an older version of Tandem; {fix}"


def _companions(model: Source, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for companion in model.companions:
        shutil.copyfile(companion, folder / companion.name)
    if not (folder / "config.json").is_file():
        dtype = str(model.weights["model.embed_tokens.weight"].dtype).removeprefix("torch.")
        content = {**config_json(model.shapes), "dtype": dtype, "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in COMPANIONS if (folder / name).is_file())


def _from_huggingface(folder: Path, config: Path | None) -> Source:
    shapes = read_shapes(config or folder)
    content = read_json((config or folder) / "config.json")
    if is_packed_config(content) or decoded_blocks(content, str(folder)) is not None:
        raise UserError(f"'{folder}' is quantised, which has no other layout; give the unquantized checkpoint")
    if config is None:
        check_weights(folder, shapes)
    given = {name: tensor for name, tensor in read_tensors(folder) if not name.endswith("rotary_emb.inv_freq")}
    if shapes.tie_word_embeddings and torch.equal(
        given.get("lm_head.weight", torch.empty(0)), given.get("model.embed_tokens.weight", torch.empty(0))
    ):
        given.pop("lm_head.weight", None)
    return Source(shapes, _checked(folder, shapes, given), _files(config or folder), 0)


def _from_megatron(folder: Path, config: Path | None) -> Source:
    checkpoint = open_megatron(folder)
    inside = checkpoint.folder.parent / INSIDE
    known = config or (inside if (inside / "config.json").is_file() else None)
    shapes = read_shapes(known) if known is not None else shapes_of(checkpoint.arguments)
    return Source(shapes, read_megatron(checkpoint, shapes), _files(known) if known is not None else (), checkpoint.iteration)


def _from_megatron_dist(folder: Path, config: Path | None) -> Source:
    checkpoint = open_dist_checkpoint(folder)
    inside = checkpoint.folder.parent / INSIDE
    known = config or (inside if (inside / "config.json").is_file() else None)
    shapes = read_shapes(known) if known is not None else shapes_of(checkpoint.arguments)
    with temporary_folder() as scratch:
        read = scratch / "model"
        read.mkdir()
        (read / "config.json").write_text(json.dumps(config_json(shapes)), encoding="utf-8")
        run_task(Task("read", str(read), str(checkpoint.folder.absolute())), scratch)
        weights = {name: tensor.clone() for name, tensor in read_tensors(read)}
    return Source(shapes, _checked(folder, shapes, weights), _files(known) if known is not None else (), checkpoint.iteration)


def _from_tandem(folder: Path, config: Path | None) -> Source:
    try:
        manifest, _ = verify(folder)
    except Damaged as error:
        raise UserError(f"the checkpoint '{folder}' cannot be read: {error}; give another one") from None
    shapes, contents = read_shapes(config or folder), Contents(folder, manifest)
    if any(is_of_adapter(key.name) for key in contents.held):
        raise UserError(f"the checkpoint '{folder}' holds an adapter and not the model that it was trained for; give the run's folder 'model', which has both")
    shards = []
    for key in contents.held:
        if key.state == WEIGHTS:
            size, dtype = contents.whole(key)
            shards.append(Shard(Key(WEIGHTS, key.name), size, whole_offsets(size), torch.empty(size, dtype=dtype)))
    contents.read(shards)
    return Source(shapes, _checked(folder, shapes, {shard.key.name: shard.tensor for shard in shards}), _files(config or folder), manifest.step)


def _checked(folder: Path, shapes: ModelShapes, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``given`` in the model's order. Raises ``UserError`` where the tensors are not those that its config describes."""
    wanted = dict(parameters(shapes))
    for name in [*wanted, *given]:
        if name not in given or name not in wanted:
            said = "lacks" if name in wanted else "has an unknown"
            raise UserError(f"'{folder}' {said} tensor '{name}', which does not match its config.json; give a whole model, or another config.json")
        if tuple(given[name].shape) != tuple(wanted[name]):
            raise UserError(f"'{name}' in '{folder}' is {list(given[name].shape)}; its config.json requires {list(wanted[name])}")
    return {name: given[name] for name in wanted}


_READERS = {"huggingface": _from_huggingface, "megatron": _from_megatron, "megatron-dist": _from_megatron_dist, "tandem": _from_tandem}
