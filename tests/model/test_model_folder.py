"""Weights of a folder: strict and atomic, with every error reported."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from tandem.config.model import NewModelConfig
from tandem.kernels import Kernels, select
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.create_model import create_model
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model, load_tensors, read_tensors, save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.storage.folder_manifest import check_folder
from tandem.text.characters import make_character_tokenizer
from tandem.types import RunError, UserError

TIED = ModelShapes("qwen3", 31, 16, 2, 2, 1, 8, 24, 64, True, qk_norm=True)
BIASED = ModelShapes("llama", 31, 16, 2, 2, 1, 8, 24, 64, False, attention_bias=True, output_bias=True, mlp_bias=True)


def decoder_of(shapes: ModelShapes, seed: int = 0, kernels: Kernels | None = None) -> Decoder:
    decoder = Decoder(shapes, kernels or select("reference"))
    initialise(decoder, seed)
    return decoder


@pytest.mark.parametrize("shapes", [TIED, BIASED], ids=["tied", "biased"])
def test_tensors_come_in_the_order_and_shapes_of_the_layout_as_views(shapes) -> None:
    decoder = decoder_of(shapes)
    assert [(name, tuple(tensor.shape)) for name, tensor in to_huggingface(decoder)] == [
        tuple(p) for p in parameters(shapes)
    ]
    memory = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in decoder.parameters()]
    assert all(any(a <= tensor.data_ptr() < b for a, b in memory) for _, tensor in to_huggingface(decoder))


def test_fused_rows_are_q_k_v_and_gate_up() -> None:
    decoder = decoder_of(BIASED)
    tensors = dict(to_huggingface(decoder))
    layer = decoder.layers[1]
    at = "model.layers.1.self_attn."
    assert torch.equal(layer.qkv_proj.weight, torch.cat([tensors[f"{at}{n}_proj.weight"] for n in "qkv"]))
    assert torch.equal(layer.qkv_proj.bias, torch.cat([tensors[f"{at}{n}_proj.bias"] for n in "qkv"]))
    gate_up = [tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(layer.gate_up_proj.weight, torch.cat(gate_up))


def changed(tensors: dict, **changes) -> list:
    """Returns the items of ``tensors`` with some replaced (``None``: removed)."""
    names = {key: key.replace("__", ".") for key in changes}
    merged = {**tensors, **{names[key]: value for key, value in changes.items()}}
    return [(name, tensor) for name, tensor in merged.items() if tensor is not None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__norm__weight": None}, ["'model.norm.weight'", "missing"]),
        ({"model__norm__weight": torch.zeros(17)}, ["'model.norm.weight'", "[17]", "[16]"]),
        ({"model__layers__0__mlp__up_proj__weight": torch.zeros(16, 24)}, ["up_proj", "[16, 24]", "[24, 16]"]),
        ({"model__layers__2__mlp__up_proj__weight": torch.zeros(24, 16)}, ["layers.2", "not a parameter"]),
        ({"model__norm__weight": torch.zeros(16, dtype=torch.int8)}, ["'model.norm.weight'", "int8"]),
        ({"lm_head__weight": torch.zeros(31, 16)}, ["lm_head.weight", "tie_word_embeddings"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_faulty_set_of_tensors_is_named_and_nothing_is_written(changes, named, packed, packed_logits) -> None:
    decoder = decoder_of(TIED)
    tokens = [torch.arange(9)]
    before = packed_logits(decoder, tokens)[0].detach()
    if packed:
        decoder.pack()
    other = {name: tensor.clone() for name, tensor in to_huggingface(decoder_of(TIED, seed=1))}
    with pytest.raises(UserError) as error:
        load_tensors(decoder, changed(other, **changes))
    assert all(part in str(error.value) for part in named) and "\n" not in str(error.value)
    assert decoder.is_packed == packed
    assert torch.equal(packed_logits(decoder, tokens)[0], before)


def test_a_tensor_given_twice_is_refused() -> None:
    tensors = list(to_huggingface(decoder_of(TIED)))
    with pytest.raises(UserError, match=r"'model\.norm\.weight' is given twice"):
        load_tensors(decoder_of(TIED, 1), [*tensors, ("model.norm.weight", torch.ones(16))])


def test_harmless_extras_of_real_checkpoints_are_accepted() -> None:
    source, target = decoder_of(TIED), decoder_of(TIED, 1)
    extras = [
        ("lm_head.weight", source.embed_tokens.detach()),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    ]
    load_tensors(target, [*to_huggingface(source), *extras])
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize("shapes", [TIED, BIASED], ids=["tied", "biased"])
def test_a_packed_decoder_takes_new_weights_and_packs_again(shapes, kernels, packed_logits) -> None:
    source, target = decoder_of(shapes, 1, kernels), decoder_of(shapes, 2, kernels)
    target.pack()
    matrices = sum(p.numel() for p in target.parameters() if p.dim() == 2)
    assert matrices == shapes.vocab_size * shapes.hidden_size, "only the embedding table stays"
    load_tensors(target, to_huggingface(source))
    assert not target.is_packed
    target.pack()
    tokens = [torch.arange(9), torch.arange(30)]
    for ours, theirs in zip(packed_logits(target, tokens), packed_logits(source, tokens), strict=True):
        assert torch.equal(ours, theirs) and not ours.requires_grad


def test_a_packed_decoder_says_what_it_cannot_do() -> None:
    decoder = decoder_of(BIASED)
    decoder.pack()
    with pytest.raises(RuntimeError, match="packed"):
        _ = decoder.head_weight
    with pytest.raises(RuntimeError, match="packed"):
        list(to_huggingface(decoder))
    with pytest.raises(RuntimeError, match="packed"):
        decoder.to(torch.float64)


def test_a_sequence_past_the_last_position_is_refused(packed_logits) -> None:
    with pytest.raises(ValueError, match="65 tokens"):
        packed_logits(decoder_of(TIED), [torch.zeros(65, dtype=torch.int64)])


@pytest.fixture
def sharded(tmp_path):
    """A folder with two shards and its index."""
    folder = tmp_path / "model"
    save_model(decoder_of(BIASED), folder)
    tensors = list(read_tensors(folder))
    (folder / "model.safetensors").unlink()
    from safetensors.torch import save_file

    weight_map = {}
    for number, part in enumerate((tensors[:9], tensors[9:])):
        save_file(dict(part), folder / f"model-{number}.safetensors")
        weight_map |= {name: f"model-{number}.safetensors" for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards_hold_what_was_saved(sharded) -> None:
    expected = dict(to_huggingface(decoder_of(BIASED)))
    found = dict(read_tensors(sharded))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_faulty_files_are_named_in_one_line(sharded, tmp_path) -> None:
    def fails(change, *named) -> None:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(sharded, tmp_path / "copy")
        change(tmp_path / "copy")
        with pytest.raises(UserError) as error:
            load_model(tmp_path / "copy", select("reference"))
        assert all(part in str(error.value) for part in named) and "\n" not in str(error.value), str(error.value)

    def cut(folder, keep) -> None:
        content = (folder / "model-1.safetensors").read_bytes()
        (folder / "model-1.safetensors").write_bytes(content[:keep])

    def list_a_tensor_that_is_not_there(folder) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.extra"] = "model-0.safetensors"
        path.write_text(json.dumps(index))

    fails(lambda f: (f / "model-1.safetensors").unlink(), "model-1.safetensors", "shard")
    fails(lambda f: cut(f, -100), "model-1.safetensors", "truncated")
    fails(lambda f: cut(f, 4), "model-1.safetensors", "truncated")
    fails(lambda f: (f / "model-1.safetensors").write_bytes(b"not a tensor file at all"), "model-1.safetensors")
    fails(list_a_tensor_that_is_not_there, "model-0.safetensors", "model.extra")
    fails(lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map")
    fails(lambda f: (f / "model.safetensors.index.json").unlink(), "only safetensors")


def test_a_saved_folder_is_whole_with_its_tokenizer_and_special_ids(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_character_tokenizer("ab c", tmp_path / "tokenizer")
    save_model(decoder_of(TIED), tmp_path / "model", tmp_path / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    generation = model.generation_config
    assert (generation.pad_token_id, generation.bos_token_id, generation.eos_token_id) == (0, 1, 2)
    assert tokenizer("a cab").input_ids == [3, 5, 6, 3, 4] and model.dtype == torch.float32
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_nothing_is_overwritten_and_a_failed_save_leaves_nothing(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="already exists"):
        save_model(decoder_of(TIED), tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be saved"):
        save_model(decoder_of(TIED), tmp_path / "file" / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tandem.config.model import NewModelConfig
from tandem.model import create_model
from tandem.model.huggingface import model_folder
model_folder.write_manifest = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
config = NewModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=32)
create_model.create_model(config, 0, Path(sys.argv[1]))
"""


def test_a_save_that_is_killed_leaves_no_model_and_the_next_one_removes_what_it_wrote(tmp_path) -> None:
    folder = tmp_path / "model"
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], timeout=120).returncode == -signal.SIGKILL
    assert not folder.exists() and list(tmp_path.iterdir())
    create_model(
        NewModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=32), 0, folder
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    check_folder(folder)


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RunError, match="cannot be saved"):
            save_model(decoder_of(TIED), tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_folder_keeps_its_dtype(dtype, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = decoder_of(TIED).to(dtype)
    save_model(decoder, tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == dtype
    read = dict(read_tensors(tmp_path / "model"))
    assert all(torch.equal(tensor, read[name]) for name, tensor in to_huggingface(decoder))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first = dict(to_huggingface(decoder_of(BIASED, 3)))
    torch.set_num_threads(2)
    torch.manual_seed(99)
    again, other = dict(to_huggingface(decoder_of(BIASED, 3))), dict(to_huggingface(decoder_of(BIASED, 4)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    layers = [first[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def test_initial_weights_have_the_stated_distribution() -> None:
    shapes = ModelShapes("qwen3", 500, 128, 8, 2, 1, 64, 256, 16, True, qk_norm=True)
    for name, tensor in to_huggingface(decoder_of(shapes)):
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            expected = 0.02 / 4 if "o_proj" in name or "down_proj" in name else 0.02
            assert abs(tensor.std() / expected - 1) < 0.03 and abs(tensor.mean()) < expected / 20


def test_weights_of_layers_behind_the_last_one_are_refused_unless_they_predict_further_tokens(tmp_path) -> None:
    save_model(decoder_of(BIASED), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"tensor 'model\.layers\.1\.[a-z_.]+' is not a parameter of this llama model; check config\.json"):
        load_model(tmp_path / "model", select("reference"))
    path.write_text(json.dumps({**config, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    assert len(load_model(tmp_path / "model", select("reference")).layers) == 1
