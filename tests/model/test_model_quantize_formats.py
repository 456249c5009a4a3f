"""Quantized checkpoints of other tools, packed here with plain loops by the published formulas, loaded by Tandem and compared with
transformers on the dequantized weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.kernels import Kernels, select
from tandem.model.huggingface.model_folder import load_model
from tandem.model.quantization.formats import format_of, read_format
from tandem.model.quantization.load import load_quantized
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.types import UserError

GROUP = 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Packed = tuple[dict[str, Tensor], Tensor]


def words_of(codes: list[int], places: tuple[int, ...] = tuple(range(8))) -> list[int]:
    """Packs eight codes per word; the code of column ``places[i]`` is at bit 4 i."""
    words = []
    for start in range(0, len(codes), 8):
        word = 0
        for i, place in enumerate(places):
            word |= codes[start + place] << 4 * i
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def packed_rows(codes: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    return torch.tensor([words_of(row, places) for row in codes.tolist()], dtype=torch.int32)


def drawn(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = columns // GROUP
    scales = (torch.rand(rows, groups) * 0.03 + 0.005).half().float()
    return torch.randint(0, 16, (rows, columns)), scales, torch.randint(1, 16, (rows, groups))


def group_of(columns: int) -> Tensor:
    return torch.arange(columns) // GROUP


def awq(rows: int, columns: int, _: Tensor) -> Packed:
    codes, scales, zeros = drawn(rows, columns)
    tensors = {
        "qweight": packed_rows(codes.t(), AWQ_COLUMNS),
        "qzeros": packed_rows(zeros.t(), AWQ_COLUMNS),
        "scales": scales.t().half().contiguous(),
    }
    return tensors, (codes - zeros[:, group_of(columns)]) * scales[:, group_of(columns)]


def gptq(rows: int, columns: int, shuffle: Tensor, *, less: int = 1, act_order: bool = False) -> Packed:
    codes, scales, zeros = drawn(rows, columns)
    group = group_of(columns)[shuffle] if act_order else group_of(columns)
    tensors = {
        "qweight": packed_rows(codes.t().t()).t().contiguous(),
        "qzeros": packed_rows((zeros - less).t()),
        "scales": scales.t().half().contiguous(),
        "g_idx": group.int(),
    }
    return tensors, (codes - zeros[:, group]) * scales[:, group]


def pack_quantized(rows: int, columns: int, shuffle: Tensor, *, symmetric: bool = True, act_order: bool = False) -> Packed:
    codes, scales, zeros = drawn(rows, columns)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    group = group_of(columns)[shuffle] if act_order else group_of(columns)
    tensors = {"weight_packed": packed_rows(codes), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    if not symmetric:
        tensors["weight_zero_point"] = packed_rows(zeros.t()).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = group.int()
    return tensors, (codes - zeros[:, group]) * scales[:, group]


def int_quantized(rows: int, columns: int, _: Tensor) -> Packed:
    codes, scales = torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows, 1) * 2e-3 + 1e-4
    return {"weight": codes, "weight_scale": scales}, codes * scales


def float_quantized(rows: int, columns: int, _: Tensor, *, one_scale: bool = False) -> Packed:
    codes = (torch.randn(rows, columns) * 30).to(torch.float8_e4m3fn)
    scales = torch.rand(1 if one_scale else rows, 1) * 4e-3 + 1e-3
    return {"weight": codes, "weight_scale": scales.flatten() if one_scale else scales}, codes.float() * scales


def blocks(rows: int, columns: int, _: Tensor) -> Packed:
    codes = (torch.randn(rows, columns) * 30).to(torch.float8_e4m3fn)
    scales = torch.rand(math.ceil(rows / 32), math.ceil(columns / 32)) * 4e-3 + 1e-3
    dequantised = codes.float()
    for row in range(rows):
        for column in range(columns):
            dequantised[row, column] *= scales[row // 32, column // 32]
    return {"weight": codes, "weight_scale": scales}, dequantised


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def eight(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Packed], str]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq, ""),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, gptq, ""),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda *a: gptq(*a, less=0), "",
    ),
    "gptq desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, lambda *a: gptq(*a, act_order=True), "",
    ),
    "w4a16": (compressed("pack-quantized", FOUR), pack_quantized, ""),
    "w4a16 asymmetric": (compressed("pack-quantized", {**FOUR, "symmetric": False}), lambda *a: pack_quantized(*a, symmetric=False), ""),
    "w4a16 actorder": (compressed("pack-quantized", FOUR), lambda *a: pack_quantized(*a, act_order=True), ""),
    "int8 w8a8": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, eight("int")), int_quantized, "int8",
    ),
    "int8 w8a16": (compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), int_quantized, ""),
    "fp8 channels": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, eight("float")), float_quantized, "fp8",
    ),
    "fp8 tensor": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, eight("float")),
        lambda *a: float_quantized(*a, one_scale=True), "fp8",
    ),
    "fp8 blocks": (
        compressed(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
            {**eight("float"), "strategy": "group", "group_size": 32},
        ), blocks, "fp8 runs",
    ),
}  # fmt: skip


def rounding_hook(kind: str) -> Callable[[Any, tuple[Tensor]], tuple[Tensor]]:
    def hook(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        x = given[0]
        runs = x.unflatten(-1, (-1, 32 if kind == "fp8 runs" else x.shape[-1]))
        scales = runs.abs().amax(-1, keepdim=True) / (127 if kind == "int8" else 448)
        ratio = runs / scales
        rounded = ratio.round() if kind == "int8" else ratio.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return ((rounded * scales).flatten(-2),)

    return hook


def write_folder(peer: Any, folder: Path, name: str) -> Path:
    """Writes the transformers model in the format ``name``, and sets its own weights to the dequantized ones."""
    config, make, rounds = FORMATS[name]
    tensors = {key: value.detach().clone() for key, value in peer.state_dict().items()}
    with torch.no_grad():
        for index, layer in enumerate(peer.model.layers):
            shuffles: dict[int, Tensor] = {}
            for module, linear in layer.named_modules():
                if not isinstance(linear, torch.nn.Linear):
                    continue
                rows, columns = linear.weight.shape
                at = f"model.layers.{index}.{module}"
                # q, k and v share their inputs, and so their order of importance; here gate's differs from up's.
                shuffle = shuffles.setdefault(columns if "self_attn" in module else id(linear), torch.randperm(columns))
                packed, dequantised = make(rows, columns, shuffle)
                del tensors[f"{at}.weight"]
                tensors |= {f"{at}.{key}": value for key, value in packed.items()}
                linear.weight.copy_(dequantised)
                if rounds:
                    linear.register_forward_pre_hook(rounding_hook(rounds))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**peer.config.to_dict(), "quantization_config": config}))
    return folder


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "tie_word_embeddings": False}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_logits_are_those_of_transformers_on_the_dequantised_weights(
    tmp_path: Path, peer_model: Callable[..., Any], packed_logits: Callable[..., list[Tensor]], name: str, kernels: Kernels, architecture: str
) -> None:
    peer = peer_model(architecture, **SIZES)
    folder = write_folder(peer, tmp_path / "model", name)
    stored = read_format(folder)
    assert stored is not None
    decoder = load_quantized(folder, stored, kernels)
    assert decoder.is_packed
    tokens = [torch.randint(0, 61, (n,)) for n in (9, 30)]
    for own, ours in zip(tokens, packed_logits(decoder, tokens), strict=True):
        with torch.no_grad():
            theirs = peer(own.unsqueeze(0)).logits[0]
        # An input may round to the other side of a half if sums differ in the last bit.
        tolerance = 0.02 if FORMATS[name][2] else 2e-5
        assert (ours - theirs).norm() / theirs.norm() < tolerance


def test_modules_that_the_format_ignores_are_computed_as_they_are(
    tmp_path: Path, peer_model: Callable[..., Any], packed_logits: Callable[..., list[Tensor]]
) -> None:
    peer = peer_model("llama", **SIZES)
    own = {f"model.layers.{layer}.self_attn.o_proj": peer.model.layers[layer].self_attn.o_proj.weight.detach().clone() for layer in range(2)}
    folder = write_folder(peer, tmp_path / "model", "w4a16")
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.rpartition(".")[0] not in own}
    save_file(tensors | {f"{module}.weight": weight for module, weight in own.items()}, folder / "model.safetensors")
    with torch.no_grad():
        for layer, weight in zip(peer.model.layers, own.values(), strict=True):
            layer.self_attn.o_proj.weight.copy_(weight)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*o_proj$")
    (folder / "config.json").write_text(json.dumps(config))
    stored, tokens = read_format(folder), torch.randint(0, 61, (30,))
    assert stored is not None
    ours = packed_logits(load_quantized(folder, stored, select("reference")), [tokens])[0]
    theirs = peer(tokens.unsqueeze(0)).logits[0]
    assert (ours - theirs).norm() / theirs.norm() < 2e-5


def test_a_layer_with_plain_and_quantised_experts_is_one_clear_line(tmp_path: Path, peer_model: Callable[..., Any]) -> None:
    peer_model("qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16).save_pretrained(tmp_path / "float")
    quantize_folder(tmp_path / "float", tmp_path / "rtn", QuantizeOptions("rtn", group_size=32), select("reference"), [], lambda *at: None)
    tensors, module = load_file(tmp_path / "rtn" / "model.safetensors"), "model.layers.1.mlp.experts.2.up_proj"
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)} | {f"{module}.weight": torch.ones(32, 48)}
    save_file(plain, tmp_path / "rtn" / "model.safetensors")
    stored = read_format(tmp_path / "rtn")
    assert stored is not None
    with pytest.raises(UserError, match=f"tensor '{module}.weight' is plain and other experts of its layer are quantized"):
        load_quantized(tmp_path / "rtn", stored, select("reference"))


def test_a_wrong_order_of_nibbles_would_show(
    tmp_path: Path, peer_model: Callable[..., Any], packed_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.model.quantization import load

    peer = peer_model("llama", **SIZES)
    folder = write_folder(peer, tmp_path / "model", "awq")
    stored = read_format(folder)
    assert stored is not None
    monkeypatch.setattr(load, "AWQ_ORDER", tuple(range(8)))
    tokens = torch.randint(0, 61, (20,))
    ours = packed_logits(load_quantized(folder, stored, select("reference")), [tokens])[0]
    theirs = peer(tokens.unsqueeze(0)).logits[0]
    assert (ours - theirs).norm() / theirs.norm() > 0.1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bnb_4bit_quant_type", "fp4", "only nf4"]),
        ({"quant_method": "bitsandbytes"}, ["load_in_4bit", "load_in_8bit"]),
        ({"quant_method": "hqq"}, ["hqq", "awq, gptq"]),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, ["bits", "8"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ["group_size", "0"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["version", "gemv"]),
        ({"quant_method": "fp8"}, ["weight_block_size"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, ["activation_scheme", "static"]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, ["fmt", "e5m2"]),
        (compressed("marlin-24", FOUR), ["format", "marlin-24"]),
        (compressed("pack-quantized", {**FOUR, "num_bits": 8}), ["8 bits"]),
        (compressed("int-quantized", {"num_bits": 8, "type": "int"}, {**eight("int"), "dynamic": False}), ["static"]),
    ],
)
def test_a_format_that_is_not_read_is_one_clear_line(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        format_of(config, "m/config.json")
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in ["m/config.json", *words])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.down_proj.scales"), ["down_proj.scales", "missing"]),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(3, 3, dtype=torch.int32)}), ["up_proj.qweight", "[3, 3]"]),
        (lambda t: t["model.layers.0.mlp.up_proj.scales"].fill_(math.nan), ["up_proj.scales", "not finite"]),
        (lambda t: t.update({"model.extra": torch.ones(1)}), ["model.extra"]),
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight", "missing"]),
    ],
)
def test_a_damaged_quantised_folder_is_one_clear_line(
    tmp_path: Path, peer_model: Callable[..., Any], change: Callable[[dict[str, Tensor]], object], words: list[str]
) -> None:
    folder = write_folder(peer_model("llama", **SIZES), tmp_path / "model", "awq")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    stored = read_format(folder)
    assert stored is not None
    with pytest.raises(UserError) as caught:
        load_quantized(folder, stored, select("reference"))
    assert all(word in str(caught.value) for word in words)


def test_a_trainer_is_not_given_a_quantised_folder(tmp_path: Path, peer_model: Callable[..., Any]) -> None:
    folder = write_folder(peer_model("llama", **SIZES), tmp_path / "model", "gptq")
    with pytest.raises(UserError, match=r"quantized.*float checkpoint"):
        load_model(folder, select("reference"))
