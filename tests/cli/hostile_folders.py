"""Folders of models that are wrong in one thing, and the commands that read them."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]
"""Makes the copy of a valid model's folder wrong."""


def config(**changed: Any) -> Change:
    """Returns a change of keys of ``config.json``; ``None`` removes a key."""

    def make(folder: Path) -> None:
        content = {**json.loads((folder / "config.json").read_text()), **changed}
        (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not REMOVED}))

    return make


REMOVED = object()


def text(name: str, content: str | bytes) -> Change:
    """Returns a change that writes ``content`` to the file ``name``."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode()) and None


def without(*names: str) -> Change:
    """Returns a change that removes the files ``names``."""

    def make(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return make


def tensors(changed: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Change:
    """Returns a change of the tensors in ``model.safetensors``, by name."""

    def make(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        given = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        (folder / "manifest.json").unlink(missing_ok=True)
        save_file(dict(changed(given)), folder / "model.safetensors", {"format": "pt"})

    return make


def all_of(*changes: Change) -> Change:
    """Returns ``changes`` one after the other."""

    def make(folder: Path) -> None:
        for change in changes:
            change(folder)

    return make


def truncated(share: float) -> Change:
    """Returns a change that leaves the first ``share`` of ``model.safetensors``."""

    def make(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: int(share * len(content))])
        (folder / "manifest.json").unlink(missing_ok=True)

    return make


def sharded(index: Callable[[dict[str, Any]], Any], drop_shard: bool = False) -> Change:
    """Returns a change that divides the tensors into two files, with an index that ``index`` changes."""

    def make(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        given = sorted(load_file(folder / "model.safetensors").items())
        (folder / "model.safetensors").unlink()
        (folder / "manifest.json").unlink(missing_ok=True)
        names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        parts = dict(zip(names, (given[::2], given[1::2]), strict=True))
        for name, part in parts.items():
            save_file(dict(part), folder / name, {"format": "pt"})
        content = {"metadata": {}, "weight_map": {tensor: name for name, part in parts.items() for tensor, _ in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index(content)))
        if drop_shard:
            (folder / names[1]).unlink()

    return make


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Returns a change of the content of ``tokenizer.json``."""

    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return make


def commands(folder: Path, recipe: Path) -> dict[str, tuple[str, ...]]:
    """Returns a line of each command that reads the model in ``folder``. A model that is valid is served until the command is ended."""
    name, new = str(folder), str(folder.parent / "new")
    return {
        "generate": ("generate", name, "--prompt", "1=", "--max-tokens", "2"),
        "generate by transformers": ("generate", name, "--prompt", "1=", "--max-tokens", "2", "--model-impl", "transformers"),
        "serve": ("serve", name, "--port", "0"),
        "train": ("train", str(recipe), "--dry-run", "--model.create=null", "--sft=null", f"--model.path={json.dumps(name, ensure_ascii=False)}"),
        "quantize": ("quantize", name, new, "--method", "int8"),
        "convert": ("convert", name, new, "--to", "megatron"),
        "plan": ("plan", name, "--gpu", "H100-80GB", "--gpus", "1"),
        "plan serving": ("plan", "serving", name, "--gpu", "H100-80GB", "--requests-per-s", "1", "--prompt-tokens", "10", "--output-tokens", "10"),
    }


def copied(model: Path, into: Path, change: Change) -> Path:
    """Returns ``into``, a copy of the folder ``model`` that ``change`` has made wrong."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(model, into)
    change(into)
    return into


def header_of(shapes: Mapping[str, list[int]]) -> bytes:
    """Returns the header of a safetensors file of fp32 tensors, without any data."""
    at, entries = 0, dict[str, Any]()
    for name, shape in shapes.items():
        size = 4
        for each in shape:
            size *= each
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    content = json.dumps(entries).encode()
    return struct.pack("<Q", len(content)) + content
