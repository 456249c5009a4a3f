"""Folders of every listed family: read, written, converted and divided over ranks, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_families import TINY, Tiny, peer_logits

from tandem.backends.megatron.model_check import missing_block
from tandem.backends.vllm.model_check import check_model
from tandem.config.parallel import ParallelConfig
from tandem.jobs.convert import convert
from tandem.kernels import select
from tandem.layout.mesh_check import check_layout
from tandem.layout.parameters import parameter_count
from tandem.layout.sharding import ShardSpec, shard_slices
from tandem.model.families_document import with_table
from tandem.model.huggingface.model_folder import load_model, read_tensors, save_model, to_huggingface
from tandem.model.huggingface.safetensors_file import read_file, write_file
from tandem.model.megatron.terms import missing_term
from tandem.planner.model_sizes import read_model_sizes
from tandem.types import UserError

IN_MEGATRON = {"glm4_moe", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
"""Those whose tiny folder has only what Megatron's layers have. DeepSeek's have, but for the biases of latent attention that the tiny ones turn on."""


def test_a_folder_goes_there_and_back_and_its_parameters_are_counted(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = load_model(tiny.folder, select("reference"))
    save_model(decoder, tmp_path / "ours", eos_token_id=2, bos_token_id=1, pad_token_id=0)
    returned, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval(), tiny.peer.state_dict()
    assert type(returned) is type(tiny.peer)
    assert returned.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in returned.state_dict().items())
    # Where tensors lie in memory may change the last bits of transformers.
    assert (peer_logits(returned) - peer_logits(tiny.peer)).abs().max() < 1e-5
    for folder in (tiny.folder, tmp_path / "ours"):
        sizes = read_model_sizes(folder)
        assert sizes == decoder.shapes
        assert parameter_count(sizes) == tiny.peer.num_parameters()


def test_a_conversion_to_megatron_and_back_has_the_same_file_or_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    shapes = read_model_sizes(tiny.folder)
    lacking = missing_term(shapes)
    assert (lacking is None) == (tiny.family in IN_MEGATRON)
    if lacking is None:
        convert(tiny.folder, tmp_path / "megatron", to="megatron")
        convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
        before, after = (dict(read_file(folder / "model.safetensors")) for folder in (tiny.folder, tmp_path / "back"))
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        return
    with pytest.raises(UserError, match=f"the {tiny.family} model has {lacking}, which Megatron's layout"):
        convert(tiny.folder, tmp_path / "megatron", to="megatron")
    assert missing_block(shapes) == lacking


@pytest.mark.parametrize("case", [("glm4_moe", "model.layers.3.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")])
def test_layers_that_predict_further_tokens_are_left_out(case: tuple[str, str], peer_model: Callable[..., Any], tmp_path: Path) -> None:
    family, further = case
    peer = peer_model(family, **TINY[family])
    peer.save_pretrained(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in read_file(tmp_path / "model.safetensors")}
    write_file(tmp_path / "model.safetensors", [*tensors.items(), (further, torch.zeros(3, 3))])
    assert [name for name, _ in to_huggingface(load_model(tmp_path, select("reference"))) if name not in tensors] == []


def test_a_stack_with_rows_for_other_heads_is_named(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("phi3").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": 4}))
    with pytest.raises(UserError, match=r"tensor 'model.layers.0.self_attn.qkv_proj.weight' has shape \[96, 48\]; config.json requires 144 rows"):
        load_model(tmp_path / "model", select("reference"))


def test_vllm_is_refused_for_a_folder_with_stacks_of_experts(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("gpt_oss", **TINY["gpt_oss"]).save_pretrained(tmp_path)
    recipe: Any = None
    with pytest.raises(UserError, match=r"is a gpt_oss, whose folder has all experts of a layer in one tensor.*; set rollout\.backend to tandem"):
        check_model(read_model_sizes(tmp_path), "cpu", recipe)


def test_the_document_has_the_table_of_the_declarations() -> None:
    document = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert with_table(document) == document, "run python -m tandem.model.families_document docs/models.md"


def test_two_ranks_hold_every_parameter_once_or_the_model_is_refused_by_name(tiny: Tiny) -> None:
    shapes = read_model_sizes(tiny.folder)
    ranks = [ShardSpec(rank, 2) for rank in range(2)]
    if shapes.qk_norm_all_heads:
        with pytest.raises(ValueError, match=f"this {tiny.family} model has norms of queries and keys over all heads"):
            ranks[0].check(shapes)
        with pytest.raises(UserError, match=f"'parallel.tensor' is 2; this {tiny.family} model has norms of queries and keys over all heads: leave it at 1"):
            check_layout(shapes, ParallelConfig(tensor=2))
        return
    check_layout(shapes, ParallelConfig(tensor=2))
    for name, tensor in read_tensors(tiny.folder):
        parts = [shard_slices(shapes, name, tuple(tensor.shape), rank) for rank in ranks]
        if parts[0] != parts[1]:
            axis = next(i for i, (a, b) in enumerate(zip(*parts, strict=True)) if a != b)
            assert torch.equal(torch.cat([tensor[part] for part in parts], axis), tensor), name
