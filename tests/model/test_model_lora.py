"""Adapters in PEFT's format against merged weights in transformers, and a batch against single rows."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tandem.config.lora import LoraConfig
from tandem.kernels import Kernels
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families import mixtral
from tandem.model.huggingface.model_folder import load_model, load_tensors, to_huggingface
from tandem.model.huggingface.peft_folder import load_adapter
from tandem.model.initialise import initialise
from tandem.model.lora import AdapterStacks, lora_batch, stack
from tandem.types import UserError

SHAPES = ModelShapes("qwen3", 61, 48, 2, 4, 2, 16, 80, 128, True, qk_norm=True)
SIZES = {
    "self_attn.q_proj": (64, 48), "self_attn.k_proj": (32, 48), "self_attn.v_proj": (32, 48), "self_attn.o_proj": (48, 64),
    "mlp.gate_proj": (80, 48), "mlp.up_proj": (80, 48), "mlp.down_proj": (48, 80),
}  # fmt: skip
ALL = tuple(SIZES)


def write_adapter(
    folder: Path, modules: tuple[str, ...] = ALL, rank: int = 4, alpha: float = 8, seed: int = 0, layers: int = 2, **config: Any
) -> dict[str, torch.Tensor]:
    """Writes an adapter in PEFT's format; returns its folder, and the change of each matrix of the base model in float64."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    for layer in range(layers):
        for module in modules:
            rows, columns = SIZES[module]
            a, b = (0.3 * torch.randn(*shape, generator=generator) for shape in ((rank, columns), (rows, rank)))
            at = f"model.layers.{layer}.{module}"
            tensors[f"base_model.model.{at}.lora_A.weight"], tensors[f"base_model.model.{at}.lora_B.weight"] = a, b
            added[f"{at}.weight"] = scale * (b.double() @ a.double())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": [m.split(".")[1] for m in modules],
        "use_rslora": False, "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**content, **config}))
    return added


def random_decoder(kernels: Kernels, shapes: ModelShapes = SHAPES) -> Decoder:
    decoder = Decoder(shapes, kernels)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)
    return decoder


def logits_of(decoder: Decoder, tokens: torch.Tensor, lora: Any = None) -> torch.Tensor:
    context = PackedContext(torch.tensor([0, len(tokens)]), len(tokens))
    with torch.no_grad():
        return decoder.logits(decoder(tokens, torch.arange(len(tokens)), context, lora=lora))


CASES: dict[str, dict[str, Any]] = {
    "all matrices": {},
    "query and value, rank 1": {"modules": ("self_attn.q_proj", "self_attn.v_proj"), "rank": 1},
    "key and up": {"modules": ("self_attn.k_proj", "mlp.up_proj"), "rank": 8},
    "rank-stabilised": {"use_rslora": True, "rank": 7, "alpha": 3},
    "the first layer only": {"layers": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_merged_weights_in_transformers(case, kernels, peer_model, tmp_path) -> None:
    peer = peer_model("qwen3", head_dim=16, tie_word_embeddings=True)
    peer.save_pretrained(tmp_path / "base")
    decoder = load_model(tmp_path / "base", kernels)
    added = write_adapter(tmp_path / "adapter", **CASES[case])
    tokens = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1))
    before = peer(tokens.unsqueeze(0)).logits[0]
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if name in added:
                parameter += added[name].float()
        theirs = peer(tokens.unsqueeze(0)).logits[0]
    adapter = load_adapter(tmp_path / "adapter", SHAPES, 8)
    layers = stack([None, adapter], SHAPES, kernels, 8, decoder.embed_tokens.detach())
    ours = logits_of(decoder, tokens, lora_batch(layers, torch.ones(40, dtype=torch.int64), 2))
    assert (theirs - before).abs().max() > 0.1, "the adapter must change something"
    assert (ours - theirs).abs().max() < 1e-4


def test_rows_have_the_bits_of_their_adapter_alone_and_others_those_of_no_adapter(kernels, tmp_path) -> None:
    decoder = random_decoder(kernels)
    decoder.pack()
    adapters = []
    for i, modules in enumerate((ALL, ALL, ("self_attn.v_proj", "mlp.down_proj"))):
        write_adapter(tmp_path / str(i), modules, rank=2 + 3 * i, seed=i)
        adapters.append(load_adapter(tmp_path / str(i), SHAPES, 8))
    like = decoder.embed_tokens.detach()
    layers = stack(adapters, SHAPES, kernels, 8, like)
    tokens = torch.randint(0, 61, (90,), generator=torch.Generator().manual_seed(1))
    slots = torch.cat([torch.full((n,), slot) for n, slot in ((17, 1), (30, -1), (1, 0), (20, 2), (22, 0))])
    lengths = [17, 30, 1, 20, 22]
    positions = torch.cat([torch.arange(n) for n in lengths])
    context = PackedContext(torch.tensor([0, *lengths]).cumsum(0), 30)
    with torch.no_grad():
        mixed = decoder(tokens, positions, context, lora=lora_batch(layers, slots, 3)).split(lengths)
    start = 0
    for length, own, slot in zip(lengths, mixed, (1, -1, 0, 2, 0), strict=True):
        part = tokens[start : start + length]
        alone = None
        if slot >= 0:
            held = [adapter if i == slot else None for i, adapter in enumerate(adapters)]
            alone = lora_batch(stack(held, SHAPES, kernels, 8, like), torch.full((length,), slot), 3)
        assert torch.equal(decoder.logits(own), logits_of(decoder, part, alone))
        start += length


def test_no_adapter_in_the_batch_is_no_work() -> None:
    assert lora_batch(AdapterStacks([], {}), torch.full((5,), -1), 3) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 9}, "rank 9; this engine allows at most 8"),
    "dora": ({"use_dora": True}, "use_dora True; only false is supported"),
    "biases": ({"bias": "all"}, "bias 'all'; only \"none\" is supported"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "ranks of its own": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "another kind": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "too many layers": ({"layers": 3}, "layer 2; this model has no such matrix"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_compute_something_else_are_refused_by_name(case, tmp_path) -> None:
    changes, message = REFUSED[case]
    write_adapter(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_adapter(tmp_path, SHAPES, 8)


def test_embeddings_wrong_shapes_and_missing_files_are_refused_by_name(tmp_path) -> None:
    write_adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 61)}, path)
    with pytest.raises(UserError, match=r"embed_tokens\.lora_embedding_A"):
        load_adapter(tmp_path, SHAPES, 8)
    save_file({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 61)}, path)
    with pytest.raises(UserError, match=r"lora_A of 'up_proj' in layer 0 is \[4, 61\]; this model requires \[4, 48\]"):
        load_adapter(tmp_path, SHAPES, 8)
    save_file({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 48)}, path)
    with pytest.raises(UserError, match="lora_B of 'up_proj' in layer 0 is missing"):
        load_adapter(tmp_path, SHAPES, 8)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="broken or truncated"):
        load_adapter(tmp_path, SHAPES, 8)
    path.unlink()
    with pytest.raises(UserError, match=r"has no readable adapter_model\.safetensors"):
        load_adapter(tmp_path, SHAPES, 8)


def test_a_mixture_of_experts_takes_adapters_of_its_attention_only(tmp_path) -> None:
    shapes = ModelShapes("mixtral", 61, 48, 2, 4, 2, 16, 80, 128, False, experts=ExpertShapes(4, 2, 80, names=mixtral.NAMES))
    write_adapter(tmp_path)
    with pytest.raises(UserError, match="a mixture of experts"):
        load_adapter(tmp_path, shapes, 8)
    write_adapter(tmp_path, tuple(name for name in ALL if name.startswith("self_attn")))
    adapter = load_adapter(tmp_path, shapes, 8)
    decoder = random_decoder(ReferenceKernels(), shapes)
    layers = stack([adapter], shapes, decoder.kernels, 8, decoder.embed_tokens.detach())
    tokens = torch.arange(20)
    with_it = logits_of(decoder, tokens, lora_batch(layers, torch.zeros(20, dtype=torch.int64), 1))
    assert (with_it - logits_of(decoder, tokens)).abs().max() > 0.1


def test_an_adapter_of_gated_attention_changes_gates_too() -> None:
    shapes = replace(SHAPES, architecture="qwen3_next", attention_gate=True)
    decoder, merged = Decoder(replace(shapes, lora=LoraConfig(rank=2)), ReferenceKernels()), Decoder(shapes, ReferenceKernels())
    initialise(decoder, 0, 0.2)
    own = dict(to_huggingface(decoder))
    with torch.no_grad():
        for name in (name for name in own if "lora_B" in name):
            own[name].normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    assert own["model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (2 * 4 * 16, 2)
    product = lambda name: own[name.replace(".weight", ".lora_B.weight")] @ own[name.replace(".weight", ".lora_A.weight")]
    scale = LoraConfig(rank=2).scale
    whole = {name: tensor + scale * product(name) if name.replace(".weight", ".lora_A.weight") in own else tensor for name, tensor in own.items()}
    load_tensors(merged, ((name, tensor) for name, tensor in whole.items() if "lora_" not in name))
    tokens = torch.arange(12)
    torch.testing.assert_close(logits_of(decoder, tokens), logits_of(merged, tokens), rtol=1e-4, atol=1e-4)
