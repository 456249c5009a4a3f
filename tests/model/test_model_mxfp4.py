"""Folders of gpt-oss in MXFP4, as OpenAI publishes them, against what transformers decodes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.jobs.convert import convert
from tandem.kernels import select
from tandem.kernels.quantized import PackedQuantized, dequantize
from tandem.layout.parameters import parameter_count
from tandem.model.decoder import PackedContext
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.model_folder import load_model, load_tensors, read_tensors, save_model
from tandem.model.quantization.formats import read_format
from tandem.model.quantization.load import held_bytes
from tandem.model.quantization.mxfp4 import decode, encode, pack_exactly
from tandem.planner.model_sizes import read_model_sizes
from tandem.text.characters import make_character_tokenizer
from tandem.types import UserError

SIZES = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16,
    "sliding_window": 9, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
}  # fmt: skip
PUBLISHED = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}


@pytest.fixture(scope="module")
def folder(peer_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the form of openai/gpt-oss-20b: blocks and scales of experts in two shards, the rest in bf16."""
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    make_character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789", path)
    peer_model("gpt_oss", **SIZES).to(torch.bfloat16).save_pretrained(path)
    tensors, numbers = load_file(path / "model.safetensors"), torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=numbers, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (experts, rows, columns // 32), generator=numbers, dtype=torch.uint8)
    write(path, tensors)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": PUBLISHED, "eos_token_id": [2, 3]}))
    return path


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Scales lie in another shard than their blocks."""
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for name, tensor in tensors.items():
        shards[f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors"][name] = tensor
    for shard, held in shards.items():
        save_file(held, path / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(scope="module")
def decoded(folder: Path) -> Any:
    """transformers' model of the folder, decoded by it to bf16."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16).eval()


def test_every_code_and_scale_is_decoded_as_transformers_decodes_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(254, 16, 1, 16).contiguous()
    # 255 is no number; 0 and 254 are 2^-127 and 2^127.
    scales = torch.arange(254, dtype=torch.uint8).view(254, 1, 1).expand(254, 16, 1).contiguous()
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)
    ours = torch.stack([decode(*pair, 32) for pair in zip(codes, scales, strict=True)])
    assert torch.equal(ours, theirs.transpose(1, 2)) and ours.unique().numel() > 1000


def test_weights_and_logits_are_those_of_transformers_own_decoding(folder: Path, decoded: Any, tmp_path: Path) -> None:
    assert read_format(folder) is None, "what is decoded as it is read is a plain folder for everything else"
    decoder = load_model(folder, select("cpu"))
    tokens = torch.randint(3, 40, (33,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = decoder(tokens, torch.arange(33), PackedContext(torch.tensor([0, 33], dtype=torch.int32), 33))
        ours, theirs = decoder.logits(hidden), decoded.float()(tokens.unsqueeze(0)).logits[0]
    assert theirs.std() > 0.3 and (ours - theirs).abs().max() < 1e-4
    # What is written is plain, and transformers reads it.
    save_model(decoder, tmp_path / "written", folder, like=folder, dtype=torch.bfloat16)
    written, config = load_file(tmp_path / "written" / "model.safetensors"), read_json(tmp_path / "written" / "config.json")
    assert "quantization_config" not in config and config["eos_token_id"] == [2, 3]
    expected = decoded.to(torch.bfloat16).state_dict()
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    assert read_json(tmp_path / "written" / "generation_config.json") == read_json(folder / "generation_config.json")


def test_the_engine_the_planner_and_conversion_see_a_plain_folder(folder: Path, decoded: Any, tmp_path: Path) -> None:
    assert parameter_count(read_model_sizes(folder)) == decoded.num_parameters()
    with LLM(str(folder), dtype="float32", max_model_len=64, kv_cache_tokens=256) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": [5, 9, 30]}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    tokens = [5, 9, 30, *answer.outputs[0].token_ids]
    with torch.no_grad():
        likeliest = decoded.float()(torch.tensor([tokens])).logits[0].argmax(-1)
    assert tokens[3:] == likeliest[2:-1].tolist()
    with pytest.raises(UserError, match="which Megatron's layout has no place for"):
        convert(folder, tmp_path / "megatron", to="megatron")


def test_what_is_missing_or_has_another_shape_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = dict(load_file(folder / "model-00001-of-00002.safetensors")) | dict(load_file(folder / "model-00002-of-00002.safetensors"))
    at = "model.layers.1.mlp.experts.down_proj"

    def broken(**changes: Tensor | None) -> Path:
        path = tmp_path / "-".join(changes)
        shutil.copytree(folder, path)
        changed = {**tensors, **{f"{at}_{kind}": tensor for kind, tensor in changes.items()}}
        write(path, {name: tensor for name, tensor in changed.items() if tensor is not None})
        return path

    with pytest.raises(UserError, match=f"tensor '{at}_scales' is missing from the weights, which have '{at}_blocks'; download the folder again"):
        list(read_tensors(broken(scales=None)))
    with pytest.raises(UserError, match=rf"tensor '{at}_blocks' has shape \[3, 64, 1, 8\]; config.json requires \[3, 64, 1, 16\]"):
        list(read_tensors(broken(blocks=tensors[f"{at}_blocks"][..., :8].contiguous())))
    with pytest.raises(UserError, match=rf"tensor '{at}_bias' has shape \[2, 64\]; config.json requires \[3, 64\]"):
        list(read_tensors(broken(bias=tensors[f"{at}_bias"][:2].contiguous())))


def test_numbers_are_encoded_with_their_bits_or_not_at_all() -> None:
    numbers = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (40, 3, 16), generator=numbers, dtype=torch.uint8)
    scales = torch.randint(0, 252, (40, 3), generator=numbers, dtype=torch.uint8)
    blocks[0], blocks[1] = 0, 0x88  # Zeros, and negative ones.
    for columns in (96, 70):
        weight = decode(blocks, scales, columns).float()
        coded = encode(weight)
        assert coded is not None and torch.equal(dequantize(coded).view(torch.int32), weight.view(torch.int32))
        assert coded.codes.max() < 16 and coded.scales is not None
        other = weight.clone()
        other[7, 5] += other[7].abs().max() / 16
        assert encode(other) is None and encode(other * float("nan")) is None


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_product_with_codes_has_the_bits_of_the_product_with_the_decoded_weights(name: Literal["reference", "cpu"]) -> None:
    """Of groups of no, one, few and many rows, over several sums of 256 columns, with a last panel of 6 outputs and a last block of 8 columns."""
    kernels, numbers = select(name), torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (5, 70, 17, 16), generator=numbers, dtype=torch.uint8)
    weights = torch.stack([decode(each, torch.randint(100, 140, (70, 17), generator=numbers, dtype=torch.uint8), 520).float() for each in blocks])
    packed = pack_exactly(kernels, weights)
    assert packed is not None and isinstance(packed, PackedQuantized)
    x, bounds = torch.randn(31, 520, generator=numbers), torch.tensor([0, 1, 1, 7, 24, 31])
    out = kernels.grouped_linear_packed(x, packed, bounds)
    assert torch.equal(out, kernels.grouped_linear_packed(x, kernels.pack_groups(weights), bounds)) and out.abs().max() > 1
    exact = torch.cat([x[a:b].double() @ w.double().t() for a, b, w in zip(bounds, bounds[1:], weights, strict=False)])
    assert (out - exact).norm() < 1e-6 * exact.norm()
    if name == "cpu":
        assert packed.data.nbytes == 5 * 128 * 520 // 2 and packed.scales is not None and packed.scales.nbytes == 5 * 128 * 17


def test_an_engine_keeps_experts_in_four_bits_with_the_bits_of_the_decoded_ones(folder: Path, packed_logits: Callable[..., list[Tensor]]) -> None:
    sequences = [torch.randint(3, 40, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]
    for name in ("cpu", "reference"):
        coded, plain = (load_model(folder, select(name), pack=pack) for pack in (True, False))
        trained = packed_logits(plain, sequences)
        assert all(torch.equal(a, b) for a, b in zip(packed_logits(coded, sequences), trained, strict=True))
        if name == "reference":
            continue
        plain.experts_in_mxfp4 = False
        plain.pack()
        assert all(torch.equal(a, b) for a, b in zip(packed_logits(plain, sequences), trained, strict=True))
        # 2 layers of 3 experts, whose matrices have 64 and 64 rows of 64 and 32 columns, in codes and a byte for 32 columns.
        saved = 2 * 3 * 64 * (64 + 32)
        assert held_bytes(plain) - held_bytes(coded) == 4 * saved - (saved // 2 + saved // 32)
        # What is published by a trainer has other numbers, and is kept as it is.
        changed = {name: tensor + 0.01 if "down_proj.weight" in name else tensor for name, tensor in read_tensors(folder)}
        load_tensors(coded, changed.items(), pack=True)
        load_tensors(plain, changed.items(), pack=True)
        assert all(torch.equal(a, b) for a, b in zip(packed_logits(coded, sequences), packed_logits(plain, sequences), strict=True))
        assert not any(isinstance(matrices["experts"].down, PackedQuantized) for matrices in coded.packed_matrices()[:-1])
        assert all(isinstance(matrices["experts"].gate_up, PackedQuantized) for matrices in coded.packed_matrices()[:-1])
