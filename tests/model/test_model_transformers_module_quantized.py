"""Quantized weights of a module of transformers: beside an adapter in training (QLoRA) and in an engine, against transformers on the dequantized weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dequantized import KINDS, Kind, dequantized
from torch import Tensor, nn

from tandem.config.implementation import Implementation
from tandem.config.lora import LoraConfig
from tandem.kernels import select
from tandem.layout.parameters import parameters
from tandem.layout.shapes import adapted_shapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import (
    adapter_of,
    load_adapter_tensors,
    load_model,
    load_tensors,
    read_tensors,
    to_huggingface,
    unfilled_model,
)
from tandem.model.huggingface.peft_folder import load_adapter, merged_tensors, save_adapter
from tandem.model.lora import LoraBatch, lora_batch, stack
from tandem.model.quantization.scheme import scheme_named
from tandem.types import UserError

BY_TRANSFORMERS = Implementation("transformers")
TYPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt_neox": ({"hidden_size": 64}, ("query_key_value", "dense_h_to_4h")),
    "phi": ({"hidden_size": 64}, ("q_proj", "fc2")),
    "qwen3_moe": (
        {"seed": 1, "head_dim": 16, "hidden_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
        ("q_proj", "o_proj"),
    ),
}
"""By ``model_type``: keys of a ``config.json``, and the linear layers with an adapter; the others are quantized too. Columns are no whole groups.
With seed 0 one weight is as near to one number of a format as to the next one, but for what fp32 rounds."""
QUICK = "gpt_neox"
EACH_TYPE = pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in TYPES])
SEQUENCES = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]
TOKENS = torch.cat(SEQUENCES)


def lora_of(model_type: str, kind: Kind) -> LoraConfig:
    return LoraConfig(4, 12.0, TYPES[model_type][1], quantization=kind)


def logits_of(decoder: Decoder, lora: LoraBatch | None = None) -> Tensor:
    bounds = torch.tensor([0, *map(len, SEQUENCES)]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])
    return decoder.logits(decoder(TOKENS, positions, PackedContext(bounds, max(map(len, SEQUENCES))), lora=lora))


def peer_logits(peer: Any) -> Tensor:
    return torch.cat([peer(s.unsqueeze(0)).logits[0] for s in SEQUENCES])


def drawn(decoder: Decoder) -> list[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(name, torch.randn(shape, generator=draw) * 0.2) for name, shape in parameters(decoder.shapes) if ".lora_" in name]


def trainer_of(base: Path, lora: LoraConfig) -> Decoder:
    """Returns the model as a trainer holds it, with an adapter that is not 0."""
    decoder = unfilled_model(base, select("auto"), lora=lora, implemented_by=BY_TRANSFORMERS)
    load_tensors(decoder, [*read_tensors(base, stacked=False), *drawn(decoder)])
    return decoder


@torch.no_grad()
def quantize_peer(peer: Any, kind: Kind, with_experts: bool = False) -> list[str]:
    """Gives the linear layers of ``peer`` but its head, and with ``with_experts`` its experts, the nearest weights of ``kind``. Returns their names."""
    names = []
    for name, module in peer.named_modules():
        # The router of a mixture is a class of its own here.
        if isinstance(module, nn.Linear) and module is not peer.get_output_embeddings():
            module.weight.copy_(dequantized(module.weight, kind))
            names.append(f"{name}.weight")
    for name, parameter in peer.named_parameters():
        if with_experts and parameter.ndim == 3:
            for matrix in parameter:
                matrix.copy_(dequantized(matrix, kind))
            names.append(name)
    return names


@EACH_TYPE
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_beside_4_bits_are_those_of_peft_on_the_dequantized_weights(
    kind: Kind, model_type: str, peer_model: Callable[..., Any], tmp_path: Path
) -> None:
    from peft import PeftModel

    peer, lora = peer_model(model_type, **TYPES[model_type][0]), lora_of(model_type, kind)
    peer.save_pretrained(tmp_path / "base")
    decoder = trainer_of(tmp_path / "base", lora)
    save_adapter(adapter_of(decoder), decoder.shapes, tmp_path / "adapter", tmp_path / "base")
    peer = peer.double()
    if peer._can_set_experts_implementation():
        peer.set_experts_implementation("eager")
    plain = peer_logits(peer).detach()
    assert quantize_peer(peer, kind)
    with decoder.without_adapter(), torch.no_grad():
        quantized = peer_logits(peer)
        torch.testing.assert_close(logits_of(decoder).double(), quantized, rtol=0, atol=1e-4)
    assert (quantized - plain).abs().max() > 0.01, "quantization changes something"
    theirs = PeftModel.from_pretrained(peer, tmp_path / "adapter", is_trainable=True).double()
    expected = peer_logits(theirs)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (expected * weights).sum().backward()
    of_peft = {name.replace("base_model.model.", "").replace(".default.weight", ".weight"): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for recompute in ("none", "full"):
        decoder.recompute, ours = recompute, logits_of(decoder)
        decoder.zero_grad()
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-4)
        (ours * weights.float()).sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in decoder.parameters())
        trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
        assert len(trained) == len(of_peft) == len(drawn(decoder)) and all(".lora_" in name for name in trained)
        with torch.no_grad():
            values = {name: p.detach().clone() for name, p in trained.items()}
            for p in trained.values():
                p.copy_(p.grad)
            for name, gradient in adapter_of(decoder).items():
                torch.testing.assert_close(gradient.double(), of_peft[name], rtol=0, atol=2e-4 * float(of_peft[name].abs().max()))
            for name, p in trained.items():
                p.copy_(values[name])


@EACH_TYPE
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_has_the_bits_of_the_trainer_beside_4_bits_and_so_have_chunks_and_requests(
    kind: Kind, model_type: str, peer_model: Callable[..., Any], tmp_path: Path, paged_logits: Callable[..., list[Tensor]]
) -> None:
    base, lora = tmp_path / "base", lora_of(model_type, kind)
    peer_model(model_type, **TYPES[model_type][0]).save_pretrained(base)
    trainer = trainer_of(base, lora)
    engine = load_model(base, select("auto"), pack=True, lora=lora, implemented_by=BY_TRANSFORMERS)
    with torch.no_grad():
        expected = logits_of(trainer)
        with trainer.without_adapter():
            assert logits_of(engine).equal(logits_of(trainer)), "a new adapter changes nothing"
        load_adapter_tensors(engine, dict(drawn(engine)))
        assert logits_of(engine).equal(expected)
        chunks = [[(0, 5), (2, 16)], [(0, 7), (1, 1), (2, 3)], [(1, 1), (2, 64)], [(0, 64)]]
        assert torch.cat(paged_logits(engine, SEQUENCES, chunks)).equal(expected)
    save_adapter(adapter_of(trainer), trainer.shapes, tmp_path / "adapter", base)
    served = load_model(base, select("auto"), pack=True, quantization=scheme_named(kind), implemented_by=BY_TRANSFORMERS)
    stacks = stack([None, load_adapter(tmp_path / "adapter", served.shapes, 8)], served.shapes, served.kernels, 8, served.embed_tokens.detach())
    with torch.no_grad():
        of_request = logits_of(served, lora_batch(stacks, torch.ones(len(TOKENS), dtype=torch.int64), 2))
    # An engine without a trainer rounds experts too.
    assert of_request.equal(expected) is (model_type != "qwen3_moe")


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_dequantized_ones_with_the_adapter_and_only_adapters_can_be_read_of_a_trainer(
    kind: Kind, peer_model: Callable[..., Any], tmp_path: Path
) -> None:
    base, lora = tmp_path / "base", lora_of(QUICK, kind)
    peer = peer_model(QUICK, **TYPES[QUICK][0])
    peer.save_pretrained(base)
    trainer = trainer_of(base, lora)
    rounded = set(quantize_peer(peer, kind))
    adapter, weights = adapter_of(trainer), dict(read_tensors(base, stacked=False))
    for name, tensor in merged_tensors(weights, adapter, trainer.shapes):
        # The folder names the head otherwise, which stays as it is.
        expected = peer.state_dict().get(name, weights[name]).double()
        assert (name in rounded) != expected.equal(weights[name].double())
        if (low := f"{name.removesuffix('.weight')}.lora_A.weight") in adapter:
            expected = expected + lora.scale * adapter[low.replace("lora_A", "lora_B")].double() @ adapter[low].double()
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
    assert len(rounded) == 8 and trainer.is_frozen and trainer.frozen_tensors()
    with pytest.raises(RuntimeError, match="has no plain weights"):
        list(to_huggingface(trainer))
    # Other weights are quantized in their turn.
    load_tensors(trainer, [*((name, tensor * 1.5) for name, tensor in weights.items()), *drawn(trainer)])
    changed = unfilled_model(base, select("auto"), lora=lora, implemented_by=BY_TRANSFORMERS)
    load_tensors(changed, [*((name, tensor * 1.5) for name, tensor in weights.items()), *drawn(changed)])
    assert logits_of(trainer).equal(logits_of(changed))


@EACH_TYPE
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_in_4_bits_has_the_logits_of_transformers_on_the_dequantized_weights_and_a_twin_has_them_too(
    kind: Kind, model_type: str, peer_model: Callable[..., Any], tmp_path: Path
) -> None:
    peer = peer_model(model_type, **TYPES[model_type][0])
    peer.save_pretrained(tmp_path)
    engine = load_model(tmp_path, select("auto"), pack=True, quantization=scheme_named(kind), implemented_by=BY_TRANSFORMERS)
    twin = engine.twin()
    load_tensors(twin, read_tensors(tmp_path, stacked=False), pack=True)
    quantize_peer(peer, kind, with_experts=True)
    with torch.no_grad():
        logits = logits_of(engine)
        torch.testing.assert_close(logits, peer_logits(peer), rtol=0, atol=1e-4)
        assert logits_of(twin).equal(logits)


@pytest.mark.parametrize("name", ["int8", "fp8", "w4a8", "bf16", "int8+head"])
def test_an_engine_rounds_a_declared_family_as_tandems_own_network_does(name: str, peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("qwen3", head_dim=16).save_pretrained(tmp_path)
    by_both = [
        load_model(tmp_path, select("auto"), pack=True, quantization=scheme_named(name), implemented_by=each) for each in (BY_TRANSFORMERS, Implementation())
    ]
    plain = load_model(tmp_path, select("auto"), implemented_by=BY_TRANSFORMERS)
    with torch.no_grad():
        ours, own, exact = (logits_of(decoder) for decoder in (*by_both, plain))
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-4 * float(own.abs().max()))
    assert 1e-4 < float((ours - exact).abs().max()) < 0.5 * float(exact.abs().max())


def test_the_rounding_of_a_head_with_a_bias_is_refused(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    peer_model("phi", hidden_size=64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"quantization has '\+head', and the head of PhiForCausalLM has a bias, which that would round; leave '\+head' out"):
        load_model(tmp_path, select("auto"), pack=True, quantization=scheme_named("int8+head"), implemented_by=BY_TRANSFORMERS)


def test_a_plan_counts_the_matrices_that_are_kept_in_4_bits(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    from tandem.estimate.model_bytes import weight_bytes

    peer_model(QUICK, **TYPES[QUICK][0]).save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, lora_of(QUICK, "nf4"))
    held = sum(p.numel() * 4 for p in trainer.parameters()) + sum(tensor.nbytes for tensor in trainer.frozen_tensors())
    shapes = adapted_shapes(read_shapes(tmp_path, implemented_by=BY_TRANSFORMERS), lora_of(QUICK, "nf4"))
    # Packed columns are whole blocks of the kernels.
    assert 0.8 < weight_bytes(shapes, "float32") / held <= 1.0
