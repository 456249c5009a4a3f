"""The headers of files of weights against ``config.json``, before anything else of them is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from listed_families import Tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.weight_files import check_weights, tensor_names
from tandem.types import UserError

NORM = "model.layers.1.input_layernorm.weight"


def test_the_weights_of_every_listed_family_that_transformers_writes_are_accepted(tiny: Tiny) -> None:
    check_weights(tiny.folder, read_shapes(tiny.folder))
    assert tensor_names(tiny.folder) == load_file(tiny.folder / "model.safetensors").keys()


@pytest.fixture
def folder(tiny_of: Callable[[str], Tiny], tmp_path: Path) -> Path:
    """A folder of Qwen3 that a test may change."""
    source = tiny_of("qwen3").folder
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda t: {name: x for name, x in t.items() if name != NORM}, rf"tensor '{NORM}' is missing from the weights; config\.json requires it$"),
    "shape": (lambda t: {**t, NORM: torch.zeros(3)}, rf"tensor '{NORM}' has shape \[3\]; config\.json requires \[48\]$"),
    "dtype": (lambda t: {**t, NORM: torch.zeros(48, dtype=torch.int8)}, rf"tensor '{NORM}' is I8; quantized weights are not supported here"),
    "another": (lambda t: {**t, "model.layers.1.more.weight": torch.zeros(3)}, r"'model\.layers\.1\.more\.weight' is not a parameter of this qwen3 model"),
    "a layer behind": (lambda t: {**t, "model.layers.9.input_layernorm.weight": torch.zeros(48)}, r"'model\.layers\.9\..*' is not a parameter"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_missing_has_another_shape_or_belongs_to_nothing_is_named(change: str, folder: Path) -> None:
    make, says = CHANGES[change]
    save_file(make(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(UserError, match=says):
        check_weights(folder, read_shapes(folder))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.5, 0.9999])
def test_a_truncated_file_is_named_with_the_bytes_that_it_lacks(share: float, folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(share * len(content))])
    described = rf"it has {int(share * len(content)):,} bytes, and its header describes {len(content):,}" if share >= 0.5 else ".*"
    with pytest.raises(UserError, match=rf"model\.safetensors' is broken or truncated \({described}\); download it again"):
        check_weights(folder, read_shapes(folder))


def test_a_pointer_of_git_lfs_and_a_description_of_more_than_the_files_have_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "vocab_size"):
        (folder / "config.json").write_text(json.dumps({**config, key: 10**12}))
        with pytest.raises(UserError, match=r"config\.json describes [\d,]+ parameters, and the files of weights have [\d,]+ bytes; check config\.json"):
            check_weights(folder, read_shapes(folder))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(UserError, match=r"model\.safetensors' is a pointer of Git LFS and not the file; run 'git lfs pull'"):
        check_weights(folder, read_shapes(folder))


def test_an_index_that_does_not_say_where_tensors_are_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    right = {name: shard for shard, own in shards.items() for name in own}
    shapes = read_shapes(folder)

    def index(content: object) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    index({"weight_map": right})
    check_weights(folder, shapes)
    for content in ({}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": dict.fromkeys(right, 3)}):
        index(content)
        with pytest.raises(UserError, match="has no usable weight_map"):
            check_weights(folder, shapes)
    for shard in ("c.safetensors", "../a.safetensors", "/etc/passwd", "a\0b"):
        index({"weight_map": {**right, names[0]: shard}})
        with pytest.raises(UserError, match="has no shard"):
            check_weights(folder, shapes)
    index({"weight_map": {**right, names[0]: "b.safetensors"}})
    with pytest.raises(UserError, match=rf"b\.safetensors' has no tensor '{names[0]}', which its index lists"):
        check_weights(folder, shapes)
    index({"weight_map": {name: right[name] for name in names[1:]}})
    with pytest.raises(UserError, match=rf"tensor '{names[0]}' is missing from the weights"):
        check_weights(folder, shapes)


def test_a_tied_head_that_is_listed_has_the_bytes_of_the_embedding(folder: Path) -> None:
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    check_weights(folder, read_shapes(folder))
    other = embedding.clone()
    other[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": other}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight' but config\.json has tie_word_embeddings true"):
        check_weights(folder, read_shapes(folder))
