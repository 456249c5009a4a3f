"""Reads and writes Megatron checkpoint folders: ``iter_NNNNNNN`` or ``release``, with a folder and a pickled file per rank.

Nothing in a file is executed: it is read with ``weights_only``, and objects of Megatron's own classes in its ``args`` are replaced by empty
placeholders.
"""

import errno
import hashlib
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.megatron.arguments import arguments_of, mesh_of
from tandem.model.megatron.layout import Entry, MegatronMesh, MegatronRank, Spelling, entries
from tandem.types import UserError

FILE, TRACKER, SUMS, RANK = "model_optim_rng.pt", "latest_checkpointed_iteration.txt", "SHA256SUMS", "tandem_rank"


def write_megatron(
    folder: Path, shapes: ModelShapes, weights: Mapping[str, Tensor], mesh: MegatronMesh, spelling: Spelling, iteration: int
) -> None:
    """Fills ``folder`` with a checkpoint of ``weights`` (whole, by Hugging Face name); ``iteration`` 0 is a release."""
    mesh.check(shapes)
    name = iteration_name(iteration)
    dtype = weights["model.embed_tokens.weight"].dtype
    arguments = arguments_of(shapes, mesh, dtype, iteration)
    sums = []
    for rank in mesh.ranks():
        models: dict[str, dict[str, Tensor]] = {}
        for virtual, key in enumerate(_keys(mesh)):
            model = models[key] = {}
            for entry in entries(shapes, mesh, rank, spelling, virtual=virtual):
                part = entry.join([weights[of] for of in entry.names], rank.tensor, mesh.tensor)
                # A copy, because a view would be saved with all of its storage.
                model[entry.name] = part.clone(memory_format=torch.contiguous_format)
        path = folder / name / mesh.folder(rank) / FILE
        path.parent.mkdir(parents=True)
        try:
            torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": iteration, **models, RANK: tuple(rank)}, path)
        except RuntimeError:  # torch raises it without an errno for a failed write
            raise OSError(errno.EIO, "torch could not write all of it", str(path)) from None
        with path.open("rb") as file:
            sums.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder)}\n")
    (folder / SUMS).write_text("".join(sums), encoding="ascii")
    (folder / TRACKER).write_text(f"{iteration or 'release'}\n", encoding="ascii")


class MegatronCheckpoint(NamedTuple):
    """``folder`` contains the rank folders. ``arguments``: those of its first file."""

    folder: Path
    mesh: MegatronMesh
    arguments: Namespace | None
    iteration: int


def _keys(mesh: MegatronMesh) -> list[str]:
    """Returns the keys of a rank's stages in its file."""
    return ["model"] if mesh.virtual == 1 else [f"model{virtual}" for virtual in range(mesh.virtual)]


def iteration_name(iteration: int) -> str:
    """Returns the name of the folder of a checkpoint; ``iteration`` 0 is a release."""
    return f"iter_{iteration:07d}" if iteration else "release"


def checkpoint_folder(folder: Path) -> Path:
    """Returns the checkpoint that the tracker in ``folder`` names, or ``folder`` itself."""
    if not (folder / TRACKER).is_file():
        return folder
    named = (folder / TRACKER).read_text(encoding="ascii", errors="replace").strip()
    return folder / (iteration_name(int(named)) if named.isdigit() and int(named) else named)


def open_megatron(folder: Path) -> MegatronCheckpoint:
    """Returns the checkpoint in ``folder`` (the one that its tracker names, or ``folder`` itself). Raises ``UserError`` if there is none or
    a rank's file is missing."""
    inner = checkpoint_folder(folder)
    ranks = {m[0]: m for path in inner.glob("mp_rank_*") if (m := re.fullmatch(r"mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?", path.name))}
    if not ranks:
        raise UserError(f"'{inner}' contains no mp_rank_* folders; give a Megatron checkpoint")
    first = inner / min(ranks) / FILE
    content = load_file(first)
    arguments = content.get("args")
    if isinstance(arguments, Namespace):
        mesh = mesh_of(arguments)
    else:
        arguments, columns = None, [[int(match[i] or 0) for match in ranks.values()] for i in (1, 2, 3)]
        virtual = sum(re.fullmatch(r"model\d+", str(key)) is not None for key in content)
        tensor, pipeline, expert = (max(column) + 1 for column in columns)
        mesh = MegatronMesh(tensor, pipeline, expert, virtual or 1)
    missing = [name for name in map(mesh.folder, mesh.ranks()) if not (inner / name / FILE).is_file()]
    if missing:
        raise UserError(f"'{inner / missing[0] / FILE}' is missing; the checkpoint has {mesh.tensor} x {mesh.pipeline} x {mesh.expert} ranks")
    return MegatronCheckpoint(inner, mesh, arguments, int(content.get("iteration") or 0))


def read_megatron(checkpoint: MegatronCheckpoint, shapes: ModelShapes) -> dict[str, Tensor]:
    """Returns every tensor by its Hugging Face name. Raises ``UserError`` in one line for a file that is damaged, a tensor that is missing,
    of another shape or unknown, and files that do not match."""
    mesh = checkpoint.mesh
    mesh.check(shapes)
    _check_sums(checkpoint.folder)
    wanted = dict(parameters(shapes))
    weights: dict[str, Tensor] = {}
    for pipeline in range(mesh.pipeline):
        for expert in range(mesh.expert):
            ranks = [MegatronRank(tensor, pipeline, expert) for tensor in range(mesh.tensor)]
            paths, held = [checkpoint.folder / mesh.folder(rank) / FILE for rank in ranks], [_models(checkpoint, rank) for rank in ranks]
            for virtual, models in enumerate(zip(*held, strict=True)):
                for entry in _spelled(shapes, mesh, ranks[0], models[0], virtual):
                    parts = []
                    for path, model in zip(paths, models, strict=True):
                        if entry.name not in model:
                            raise UserError(f"'{path}' has no '{entry.name}'; it is the file of another rank or another model")
                        parts.append(model.pop(entry.name))
                    _check_parts(entry, parts, shapes, wanted, paths[0])
                    for name, tensor in zip(entry.names, entry.split(parts), strict=True):
                        _keep(weights, name, tensor, wanted, paths[0])
                for path, model in zip(paths, models, strict=True):
                    if model:
                        raise UserError(f"'{path}' has '{min(model)}', which is unknown; it is the file of another rank or another model")
    return {name: weights[name] for name in wanted}


def _spelled(shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank, model: Mapping[str, Tensor], virtual: int) -> list[Entry]:
    fused = (".linear_qkv.layer_norm_weight", ".linear_kv_up_proj.layer_norm_weight")
    spelling: Spelling = "transformer_engine" if any(name.endswith(fused) for name in model) else "local"
    grouped = any(re.search(r"\.experts\.linear_fc1\.weight\d+$", name) for name in model)
    return list(entries(shapes, mesh, rank, spelling, grouped, virtual))


def _check_parts(entry: Entry, parts: list[Tensor], shapes: ModelShapes, wanted: Mapping[str, tuple[int, ...]], where: Path) -> None:
    if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
        raise UserError(f"'{entry.name}' has another shape or dtype on a neighbouring rank of '{where}'; the files do not match")
    if entry.is_replicated and not all(torch.equal(part, parts[0]) for part in parts):
        raise UserError(f"'{entry.name}' differs between the tensor-parallel ranks of '{where}'; the files do not match")
    # Checks the total size of the parts before they are divided.
    sizes = [torch.Size(wanted[name]) for name in entry.names]
    count = sum(part.numel() for part in parts[: 1 if entry.is_replicated else None])
    is_padded = entry.names[0] in ("model.embed_tokens.weight", "lm_head.weight")
    needed = sum(size.numel() for size in sizes)
    if (count < needed if is_padded else count != needed) or parts[0].shape[1:].numel() != _inner(entry, sizes[0], len(parts)):
        raise UserError(
            f"'{entry.name}' is {list(parts[0].shape)} on each of {len(parts)} ranks in '{where}', which does not make "
            f"{' and '.join(str(list(size)) for size in sizes)} of {', '.join(entry.names)}; it is from another model"
        )


def _inner(entry: Entry, size: torch.Size, ranks: int) -> int:
    by_columns = re.search(r"(linear_proj|linear_fc2)\.weight\d*$", entry.name)
    return size[1:].numel() // (ranks if by_columns else 1)


def _keep(weights: dict[str, Tensor], name: str, tensor: Tensor, wanted: Mapping[str, tuple[int, ...]], where: Path) -> None:
    if tuple(tensor.shape) != tuple(wanted[name]):
        raise UserError(f"'{where}' makes '{name}' {list(tensor.shape)}; the model's is {list(wanted[name])}")
    if name in weights and not torch.equal(weights[name], tensor):
        # Replicated tensors: all but the experts of expert-parallel ranks, and a tied embedding.
        raise UserError(f"'{name}' in '{where}' differs from the other ranks; the files do not match")
    weights[name] = tensor


def _models(checkpoint: MegatronCheckpoint, rank: MegatronRank) -> list[dict[str, Tensor]]:
    """Returns the tensors of each stage of ``rank``."""
    path = checkpoint.folder / checkpoint.mesh.folder(rank) / FILE
    content = load_file(path)
    if RANK in content and tuple(content[RANK]) != tuple(rank):
        raise UserError(f"'{path}' is the file of rank {tuple(content[RANK])} (tensor, pipeline, expert); the files are mixed up")
    if int(content.get("iteration") or 0) != checkpoint.iteration:
        raise UserError(f"'{path}' is of iteration {content.get('iteration')}, the first file of {checkpoint.iteration}; the files do not match")
    keys = _keys(checkpoint.mesh)
    for key in keys:
        if not isinstance(content.get(key), dict):
            raise UserError(f"'{path}' has no '{key}'; it is not a Megatron checkpoint, or one of another pipeline than its args say")
    if f"model{len(keys)}" in content or (keys == ["model"] and "model0" in content):
        raise UserError(f"'{path}' has more stages of its pipeline than the {len(keys)} that its args say; it is the file of another checkpoint")
    return [{name: value for name, value in content[key].items() if not str(name).endswith("_extra_state")} for key in keys]


REPLACED = ("megatron.", "transformer_engine.", "signal.", "enum.", "builtins.getattr")
"""What a checkpoint may name and is not imported. Python 3.11.0 to 3.11.3 pickle the member of an enum as a call of ``getattr``."""


class _Placeholder:
    """Replaces an object of a class that is not available; keeps none of its state."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def load_file(path: Path) -> dict[str, Any]:
    """Returns the content of a file of ``torch.save``, with which nothing is executed. Raises ``UserError`` in one line for a file that is damaged."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        foreign = [name for name in unknown if name != "argparse.Namespace"]
        strange = [name for name in foreign if not name.startswith(REPLACED)]
        if strange:
            raise UserError(f"'{path}' contains an object of '{strange[0]}', which is not supported; save only its weights and args")
        with torch.serialization.safe_globals([Namespace, *((_Placeholder, name) for name in foreign)]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"'{path}' is missing") from None
    except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"'{path}' is damaged or truncated ({' '.join(str(error).split())[:120]}); copy it again") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' contains no state; it is not a Megatron checkpoint")
    return content


def _check_sums(folder: Path) -> None:
    """Compares every file with ``SHA256SUMS``, if the checkpoint has it."""
    path = folder.parent / SUMS
    if not path.is_file():
        return
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (folder.parent / name).is_file():
            raise UserError(f"'{folder.parent / name}' is listed in {SUMS} but missing; copy it again")
        with (folder.parent / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise UserError(f"'{folder.parent / name}' does not have its digest in {SUMS}; copy it again")
