"""An adapter beside quantized weights (QLoRA): outputs and gradients are those of PEFT's formula in float64 on the dequantized weights, and an engine with
the same quantization has the trainer's bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dequantized import KINDS, Kind, dequantized
from lora_adapters import adapt
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.config.lora import LoraConfig
from tandem.estimate.model_bytes import weight_bytes
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families import qwen2_moe
from tandem.model.huggingface.model_folder import (
    adapter_of,
    load_adapter_tensors,
    load_model,
    load_tensors,
    read_tensors,
    save_model,
    unfilled_model,
)
from tandem.model.huggingface.peft_folder import load_adapter, merged_tensors, save_adapter
from tandem.model.initialise import initialise
from tandem.model.lora import LoraBatch, lora_batch, stack
from tandem.model.quantization.scheme import scheme_named

# 160 columns are groups of 64, 64 and 32, or of 128 and 32.
SHAPES = ModelShapes(
    "qwen2", vocab_size=61, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=160,
    max_position_embeddings=64, tie_word_embeddings=True, attention_bias=True,
)  # fmt: skip
KERNELS = select("auto", torch.float32, torch.device("cpu"))
TOKENS, LENGTHS = torch.arange(24) * 7 % 61, (9, 15)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = Decoder(SHAPES, KERNELS)
    initialise(decoder, seed=5, standard_deviation=0.1)
    folder = tmp_path_factory.mktemp("qlora") / "base"
    save_model(decoder, folder)
    return folder


def lora_of(kind: Kind) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, quantization=kind, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def adapter_like(decoder: Decoder) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(x.shape, generator=generator) for name, x in adapter_of(decoder).items()}


def trainer_of(base: Path, kind: Kind) -> Decoder:
    """Returns the model as a trainer holds it, with an adapter that is not 0."""
    decoder = unfilled_model(base, KERNELS, lora=lora_of(kind))
    load_tensors(decoder, [*read_tensors(base), *adapter_like(decoder).items()])
    return decoder


def hidden_of(decoder: Decoder, lora: LoraBatch | None = None) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return decoder(TOKENS, positions, PackedContext(starts, max(LENGTHS)), lora=lora)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_peft_in_float64_on_the_dequantized_weights(kind: Kind, base: Path) -> None:
    decoder = trainer_of(base, kind)
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    plain = torch.cat([reference.model(part.unsqueeze(0)).last_hidden_state[0] for part in TOKENS.split(LENGTHS)]).detach()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(dequantized(parameter, kind))
    without = torch.cat([reference.model(part.unsqueeze(0)).last_hidden_state[0] for part in TOKENS.split(LENGTHS)]).detach()
    with decoder.without_adapter():
        assert torch.allclose(hidden_of(decoder).double(), without, atol=1e-4)
    assert (without - plain).abs().max() > 0.01, "quantization changes something"
    adapted = adapt(reference, adapter_of(decoder), lora_of(kind).scale)
    expected = torch.cat([adapted.model(part.unsqueeze(0)).last_hidden_state[0] for part in TOKENS.split(LENGTHS)])  # type: ignore[operator,union-attr]
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weights).sum().backward()
    hidden = hidden_of(decoder)
    (hidden * weights.float()).sum().backward()
    assert torch.allclose(hidden.double(), expected, atol=1e-4)
    for parameter in decoder.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        parameter.data = parameter.grad if parameter.grad is not None else parameter.data
    for name, gradient in adapter_of(decoder).items():
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        wanted = getattr(adapted.get_submodule(module), side).grad
        assert torch.allclose(gradient.double(), wanted, atol=1e-4 * float(wanted.abs().max())), name


@pytest.mark.parametrize("kind", KINDS)
def test_engine_has_the_bits_of_the_trainer_and_so_has_a_served_adapter(kind: Kind, base: Path, tmp_path: Path) -> None:
    trainer = trainer_of(base, kind)
    expected = hidden_of(trainer)
    engine = load_model(base, KERNELS, pack=True, lora=lora_of(kind), seed=3)
    with trainer.without_adapter():
        assert torch.equal(hidden_of(engine), hidden_of(trainer)), "a new adapter changes nothing"
    load_adapter_tensors(engine, adapter_like(engine))
    assert torch.equal(hidden_of(engine), expected)
    save_adapter(adapter_of(trainer), trainer.shapes, tmp_path / "adapter", base)
    served = load_model(base, KERNELS, pack=True, quantization=scheme_named(kind))
    layers = stack([None, load_adapter(tmp_path / "adapter", SHAPES, 8)], SHAPES, KERNELS, 8, served.embed_tokens.detach())
    assert torch.equal(hidden_of(served, lora_batch(layers, torch.ones(len(TOKENS), dtype=torch.int64), 2)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_dequantized_ones_with_the_adapter(kind: Kind, base: Path) -> None:
    trainer, weights = trainer_of(base, kind), load_file(base / "model.safetensors")
    adapter = adapter_of(trainer)
    for name, tensor in merged_tensors(weights, adapter, trainer.shapes):
        expected, own = weights[name].double(), name.removesuffix(".weight")
        if own.endswith("_proj") and name.endswith(".weight"):
            expected = dequantized(weights[name], kind)
        if f"{own}.lora_A.weight" in adapter:
            expected = expected + lora_of(kind).scale * adapter[f"{own}.lora_B.weight"].double() @ adapter[f"{own}.lora_A.weight"].double()
        assert torch.allclose(tensor.double(), expected, atol=1e-6), name


HYBRID = ModelShapes(
    "qwen3_next", 61, 64, 2, 4, 2, 16, 96, 64, False, qk_norm=True, norms_from_one=True, attention_gate=True, rotary_fraction=0.5,
    linear_attention=LinearAttention((0,), 2, 4, 12, 10, 4),
    experts=ExpertShapes(4, 2, 24, names=qwen2_moe.NAMES, shared_intermediate_size=40, shared_gate=True),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_of_a_hybrid_compute_what_its_trainer_computes(kind: Kind, tmp_path: Path) -> None:
    """The matrices of linear attention and of shared experts are quantized too, those of routed experts are not."""
    decoder = Decoder(HYBRID, KERNELS)
    initialise(decoder, seed=5, standard_deviation=0.2)
    save_model(decoder, tmp_path / "base")
    lora = LoraConfig(rank=4, alpha=8.0, quantization=kind, target_modules=("q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"))
    trainer = unfilled_model(tmp_path / "base", KERNELS, lora=lora)
    load_tensors(trainer, [*read_tensors(tmp_path / "base"), *adapter_like(trainer).items()])
    held = sum(tensor.nbytes for tensor in [*trainer.parameters(), *trainer.frozen_tensors()])
    # The panels of the C++ kernels are padded to 64 rows.
    assert weight_bytes(trainer.shapes, "float32") <= held <= 1.1 * weight_bytes(trainer.shapes, "float32")
    engine = load_model(tmp_path / "base", KERNELS, pack=True, lora=lora)
    load_adapter_tensors(engine, adapter_like(engine))
    assert torch.equal(hidden_of(engine), hidden_of(trainer))
    save_model(decoder, tmp_path / "merged", tensors=merged_tensors(dict(read_tensors(tmp_path / "base")), adapter_of(trainer), trainer.shapes))
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    theirs = torch.cat([peer.model(part.unsqueeze(0)).last_hidden_state[0] for part in TOKENS.split(LENGTHS)])
    assert torch.allclose(hidden_of(trainer).double(), theirs, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_bytes_are_those_that_the_trainer_holds(kind: Kind, tmp_path: Path) -> None:
    # A multiple of 64 rows: the panels of the C++ kernels have no padding.
    shapes = replace(SHAPES, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, intermediate_size=256)
    decoder = Decoder(shapes, KERNELS)
    initialise(decoder, seed=5)
    save_model(decoder, tmp_path / "base")
    trainer = trainer_of(tmp_path / "base", kind)
    held = sum(tensor.nbytes for tensor in [*trainer.parameters(), *trainer.frozen_tensors()])
    assert held == weight_bytes(trainer.shapes, "float32")
    assert sum(tensor.nbytes for tensor in trainer.frozen_tensors()) < 0.16 * sum(
        tensor.nbytes for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items() if name.endswith("_proj.weight")
    )
