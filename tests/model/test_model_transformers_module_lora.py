"""Adapters of models that a module of transformers computes, against PEFT's own computation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.implementation import Implementation
from tandem.config.lora import LoraConfig
from tandem.kernels import select
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import adapter_of, load_model, load_tensors, read_tensors
from tandem.model.huggingface.peft_folder import load_adapter, merged_tensors, save_adapter
from tandem.model.lora import lora_batch, stack
from tandem.types import UserError

BY_TRANSFORMERS = Implementation("transformers")
TYPES: dict[str, tuple[dict[str, Any], LoraConfig]] = {
    "gpt_neox": ({"hidden_size": 64}, LoraConfig(4, 12.0, ("query_key_value", "dense"))),
    "stablelm": ({"hidden_size": 64, "use_qkv_bias": True}, LoraConfig(4, 12.0, use_rslora=True)),
    "qwen3_moe": (
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
        LoraConfig(4, 12.0, ("q_proj", "v_proj", "o_proj")),
    ),
}
QUICK = "gpt_neox"
EACH_TYPE = pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in TYPES])
SEQUENCES = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]


def drawn(shapes: ModelShapes) -> list[tuple[str, Tensor]]:
    """Returns an adapter of ``shapes`` that changes every matrix it has."""
    draw = torch.Generator().manual_seed(5)
    return [(name, torch.randn(shape, generator=draw) * 0.2) for name, shape in parameters(shapes) if ".lora_" in name]


def packed_hidden(decoder: Decoder) -> Tensor:
    bounds = torch.tensor([0, *map(len, SEQUENCES)]).cumsum(0).to(torch.int32)
    return decoder(torch.cat(SEQUENCES), torch.cat([torch.arange(len(s)) for s in SEQUENCES]), PackedContext(bounds, max(map(len, SEQUENCES))))


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_and_gradients_with_an_adapter_are_those_of_peft_and_it_alone_is_trained(
    model_type: str, peer_model: Callable[..., Any], tmp_path: Path
) -> None:
    from peft import PeftModel

    keys, lora = TYPES[model_type]
    peer, base = peer_model(model_type, **keys), tmp_path / "base"
    peer.save_pretrained(base)
    shapes = adapted_shapes(read_shapes(base, implemented_by=BY_TRANSFORMERS), lora)
    adapter = drawn(shapes)
    save_adapter(dict(adapter), shapes, tmp_path / "adapter", base)
    if peer._can_set_experts_implementation():
        peer.set_experts_implementation("eager")
    theirs = PeftModel.from_pretrained(peer.double(), tmp_path / "adapter", is_trainable=True).double()
    decoder = load_model(base, select("reference", torch.float64), dtype=torch.float64, lora=lora, implemented_by=BY_TRANSFORMERS)
    load_tensors(decoder, adapter)
    ours, expected = decoder.logits(packed_hidden(decoder)), torch.cat([theirs(s.unsqueeze(0)).logits[0] for s in SEQUENCES])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    own = {name.removeprefix("network."): p.grad for name, p in decoder.named_parameters() if p.requires_grad}
    of_peft = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(own) == len(of_peft) == len(adapter) > 0
    largest = max(float(grad.abs().max()) for grad in of_peft.values())
    by_name = {name.replace("base_model.model.", "").replace(".default.weight", ""): grad for name, grad in of_peft.items()}
    # Layers are named by the first place that has them.
    assert shapes.transformers is not None
    layers = shapes.transformers.layers
    for name, grad in own.items():
        place = name.replace("layers.", f"{layers}.", 1) if name.startswith("layers.") else name
        torch.testing.assert_close(grad, by_name[place.replace(".adapter.", ".")], rtol=1e-4, atol=1e-6 * largest)
    with torch.no_grad(), decoder.without_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(
            decoder.logits(packed_hidden(decoder)), torch.cat([theirs(s.unsqueeze(0)).logits[0] for s in SEQUENCES]), rtol=0, atol=1e-5
        )
    merged = load_model(base, select("reference", torch.float64), dtype=torch.float64, implemented_by=BY_TRANSFORMERS)
    load_tensors(merged, merged_tensors(dict(read_tensors(base, stacked=False)), dict(adapter), shapes))
    torch.testing.assert_close(merged.logits(packed_hidden(merged)), expected, rtol=0, atol=1e-4)


@EACH_TYPE
def test_the_engine_has_the_bits_of_the_trainer_and_takes_an_adapter_alone(
    model_type: str, peer_model: Callable[..., Any], tmp_path: Path, packed_logits: Callable[..., list[Tensor]], paged_logits: Callable[..., list[Tensor]]
) -> None:
    keys, lora = TYPES[model_type]
    peer_model(model_type, **keys).save_pretrained(tmp_path)
    trained = load_model(tmp_path, select("auto"), lora=lora, implemented_by=BY_TRANSFORMERS)
    served = load_model(tmp_path, select("auto"), pack=True, lora=lora, implemented_by=BY_TRANSFORMERS)
    alone = load_model(tmp_path, select("auto"), implemented_by=BY_TRANSFORMERS)
    with torch.no_grad():
        assert all(a.equal(b) for a, b in zip(packed_logits(served, SEQUENCES), packed_logits(alone, SEQUENCES), strict=True))
        for decoder in (trained, served):
            load_tensors(decoder, drawn(decoder.shapes))
        assert served.is_packed and adapter_of(served).keys() == adapter_of(trained).keys()
        expected = packed_logits(trained, SEQUENCES)
        chunks = [[(0, 5), (2, 16)], [(0, 7), (1, 1), (2, 3)], [(1, 1), (2, 64)], [(0, 64)]]
        assert not expected[0].equal(packed_logits(alone, SEQUENCES)[0])
        for other in (packed_logits(served, SEQUENCES), paged_logits(served, SEQUENCES, chunks)):
            assert all(a.equal(b) for a, b in zip(expected, other, strict=True))


@EACH_TYPE
def test_a_written_adapter_has_the_bits_of_the_trainer_as_that_of_a_request(
    model_type: str, peer_model: Callable[..., Any], tmp_path: Path, packed_logits: Callable[..., list[Tensor]]
) -> None:
    keys, lora = TYPES[model_type]
    peer_model(model_type, **keys).save_pretrained(tmp_path / "base")
    trained = load_model(tmp_path / "base", select("auto"), lora=lora, implemented_by=BY_TRANSFORMERS)
    with torch.no_grad():
        load_tensors(trained, drawn(trained.shapes))
    save_adapter(adapter_of(trained), trained.shapes, tmp_path / "adapter", tmp_path / "base")
    for packs in (False, True):
        served = load_model(tmp_path / "base", select("auto"), pack=packs, implemented_by=BY_TRANSFORMERS)
        adapter = load_adapter(tmp_path / "adapter", served.shapes, max_rank=8)
        stacks = stack([None, adapter], served.shapes, served.kernels, 8, served.embed_tokens.detach())
        bounds, tokens = torch.tensor([0, *map(len, SEQUENCES)]).cumsum(0).to(torch.int32), torch.cat(SEQUENCES)
        slots = torch.cat([torch.full((len(s),), slot) for s, slot in zip(SEQUENCES, (1, -1, 1), strict=True)])
        positions, context = torch.cat([torch.arange(len(s)) for s in SEQUENCES]), PackedContext(bounds, max(map(len, SEQUENCES)))
        with torch.no_grad():
            mixed = served.logits(served(tokens, positions, context, lora=lora_batch(stacks, slots, 2))).split([len(s) for s in SEQUENCES])
            expected, alone = packed_logits(trained, SEQUENCES), packed_logits(served, SEQUENCES)
        assert mixed[0].equal(expected[0]) and mixed[1].equal(alone[1]) and mixed[2].equal(expected[2])
        assert not mixed[0].equal(alone[0])


def test_matrices_that_the_module_does_not_have_are_refused_with_those_that_it_has(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("gpt_neox", hidden_size=64).save_pretrained(tmp_path)
    shapes = read_shapes(tmp_path, implemented_by=BY_TRANSFORMERS)
    with pytest.raises(UserError, match=r"model has no matrix 'q_proj'; set target_modules to some of query_key_value, dense, dense_h_to_4h, dense_4h_to_h"):
        adapted_shapes(shapes, LoraConfig())
    assert replace(shapes, lora=LoraConfig(target_modules=("dense",))).exported == shapes


def test_matrices_of_experts_and_a_module_without_linear_layers_are_refused(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("ernie4_5_moe", hidden_size=64, moe_num_experts=4, moe_k=2, moe_intermediate_size=40, moe_layer_start_index=1).save_pretrained(tmp_path / "moe")
    shapes = read_shapes(tmp_path / "moe", implemented_by=BY_TRANSFORMERS)
    for name in ("gate_proj", "up_proj", "down_proj"):
        says = f"mixture of experts, whose '{name}' can have no adapter; set target_modules to some of q_proj, k_proj, v_proj, o_proj$"
        with pytest.raises(UserError, match=says):
            adapted_shapes(shapes, LoraConfig(target_modules=("q_proj", name)))
    peer_model("gpt2", hidden_size=64).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"model has no linear layers that an adapter can change; leave trainer\.lora out$"):
        adapted_shapes(read_shapes(tmp_path / "gpt2", implemented_by=BY_TRANSFORMERS), LoraConfig())


def test_peft_adapters_of_stacked_experts_are_refused_with_the_way_to_serve_them(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    peer = peer_model("qwen3_moe", **TYPES["qwen3_moe"][0])
    peer.save_pretrained(tmp_path / "base")
    parameters_of_experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(peer, PeftConfig(r=2, target_modules=["q_proj"], target_parameters=parameters_of_experts, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    shapes = read_shapes(tmp_path / "base", implemented_by=BY_TRANSFORMERS)
    says = r"has target_parameters \[.*\], and the stacked matrices of experts .*; merge it into the model \(PEFT's merge_and_unload\)"
    with pytest.raises(UserError, match=says):
        load_adapter(tmp_path / "adapter", shapes, max_rank=8)
    with torch.no_grad():
        expected = torch.cat([adapted(s.unsqueeze(0)).logits[0] for s in SEQUENCES])
        with adapted.disable_adapter():
            assert not torch.allclose(torch.cat([adapted(s.unsqueeze(0)).logits[0] for s in SEQUENCES]), expected, atol=1e-2)
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = load_model(tmp_path / "merged", select("auto"), implemented_by=BY_TRANSFORMERS)
        torch.testing.assert_close(merged.logits(packed_hidden(merged)), expected, rtol=0, atol=1e-4)
