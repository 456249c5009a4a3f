"""The adapter that is trained beside frozen weights: outputs and gradients are those of PEFT's formula in float64, and what an engine computes
with it has the trainer's bits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from lora_adapters import adapt
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tandem.config.lora import ATTENTION_MODULES, LINEAR_ATTENTION_MODULES, LoraConfig
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.drawn import new_adapter
from tandem.model.families import qwen2_moe
from tandem.model.huggingface.model_folder import adapter_of, load_adapter_tensors, load_tensors, save_model, to_huggingface
from tandem.model.huggingface.peft_folder import load_adapter, merged_tensors, save_adapter
from tandem.model.initialise import initialise
from tandem.model.lora import LoraBatch, lora_batch, stack

SHAPES = ModelShapes(
    "qwen2", vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
    max_position_embeddings=64, tie_word_embeddings=True, attention_bias=True,
)  # fmt: skip
HYBRID = replace(
    SHAPES, architecture="qwen3_next", qk_norm=True, norms_from_one=True, attention_gate=True, attention_bias=False, tie_word_embeddings=False,
    rotary_fraction=0.5, linear_attention=LinearAttention((0,), 2, 4, 12, 10, 4),
    experts=ExpertShapes(4, 2, 24, names=qwen2_moe.NAMES, shared_intermediate_size=40, shared_gate=True),
)  # fmt: skip
CASES = {
    "all": replace(SHAPES, lora=LoraConfig(rank=4, alpha=12.0)),
    "a part of the stacked matrices": replace(SHAPES, lora=LoraConfig(rank=3, alpha=2.0, target_modules=("v_proj", "up_proj"))),
    "rank-stabilised": replace(SHAPES, lora=LoraConfig(rank=4, alpha=3.0, use_rslora=True, target_modules=("q_proj", "o_proj", "down_proj"))),
    "linear attention": replace(HYBRID, lora=LoraConfig(rank=3, alpha=6.0, target_modules=(*ATTENTION_MODULES, *LINEAR_ATTENTION_MODULES))),
}
TOKENS = torch.arange(24) * 7 % 61
LENGTHS = (9, 15)


def decoder_of(shapes: ModelShapes, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns a model whose adapter is not 0."""
    decoder = Decoder(shapes, select("auto", dtype, torch.device("cpu")), dtype=dtype)
    initialise(decoder, seed=5, standard_deviation=0.2)
    generator = torch.Generator().manual_seed(1)
    load_adapter_tensors(decoder, {name: 0.3 * torch.randn(x.shape, generator=generator) for name, x in adapter_of(decoder).items()})
    return decoder


def hidden_of(decoder: Decoder, lora: LoraBatch | None = None) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return decoder(TOKENS, positions, PackedContext(starts, max(LENGTHS)), lora=lora)


def peft_model(decoder: Decoder, folder: Path) -> nn.Module:
    """Returns transformers' model of the base in float64, with PEFT's linear layers around those that are adapted."""
    lora = decoder.shapes.lora
    assert lora is not None
    save_model(decoder, folder, tensors=[(name, x) for name, x in to_huggingface(decoder) if ".lora_" not in name])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    return adapt(base, adapter_of(decoder), lora.scale)


@pytest.mark.parametrize("shapes", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_are_those_of_peft_in_float64(shapes: ModelShapes, tmp_path: Path) -> None:
    decoder = decoder_of(shapes)
    reference = peft_model(decoder, tmp_path / "base")
    expected = torch.cat([reference.model(part.unsqueeze(0)).last_hidden_state[0] for part in TOKENS.split(LENGTHS)])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weights).sum().backward()
    hidden = hidden_of(decoder)
    (hidden * weights.float()).sum().backward()
    assert torch.allclose(hidden.double(), expected, atol=1e-4)
    trained = {name for name, p in decoder.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in decoder.named_parameters() if ".adapter." in name}, "nothing else has a gradient"
    for parameter in decoder.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else parameter.data
    for name, gradient in adapter_of(decoder).items():
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        wanted = getattr(reference.get_submodule(module), side).grad
        assert torch.allclose(gradient.double(), wanted, atol=1e-4 * float(wanted.abs().max())), name


@pytest.mark.parametrize("shapes", CASES.values(), ids=CASES.keys())
def test_packed_decoder_has_the_bits_of_the_trainer_before_and_after_an_update(shapes: ModelShapes) -> None:
    trainer, engine = decoder_of(shapes), decoder_of(shapes)
    engine.pack()
    packed = engine.packed_matrices()[0]["down"]
    assert torch.equal(hidden_of(engine), hidden_of(trainer))
    update = {name: x + 0.1 for name, x in adapter_of(trainer).items()}
    for decoder in (trainer, engine):
        load_tensors(decoder, update.items())
    after = hidden_of(trainer)
    assert torch.equal(hidden_of(engine), after) and not torch.equal(after, hidden_of(decoder_of(shapes)))
    kept = engine.packed_matrices()[0]["down"]
    assert getattr(kept, "weight", kept) is getattr(packed, "weight", packed), "an update of the adapter packs no other matrix again"


def test_model_without_its_adapter_and_with_a_new_one_has_the_bits_of_the_base() -> None:
    shapes = CASES["all"]
    base, adapted = decoder_of(replace(shapes, lora=None)), decoder_of(shapes)
    expected = hidden_of(base)
    assert not torch.equal(hidden_of(adapted), expected)
    with adapted.without_adapter():
        assert torch.equal(hidden_of(adapted), expected)
    load_adapter_tensors(adapted, dict(new_adapter(adapted.shapes, 3)))
    assert torch.equal(hidden_of(adapted), expected)
    for name, tensor in new_adapter(adapted.shapes, 3):
        # kaiming_uniform_ with a = sqrt(5): sqrt(6 / ((1 + 5) fan_in)).
        bound = math.sqrt(6 / (6 * tensor.shape[1]))
        assert (0.9 * bound < float(tensor.abs().max()) <= bound) if "lora_A" in name else not tensor.any()


@pytest.mark.parametrize("shapes", CASES.values(), ids=CASES.keys())
def test_exported_adapter_is_served_with_the_bits_of_the_trainer_and_the_merged_weights_are_those_of_float64(shapes: ModelShapes, tmp_path: Path) -> None:
    decoder, lora = decoder_of(shapes), shapes.lora
    assert lora is not None
    save_adapter(adapter_of(decoder), decoder.shapes, tmp_path / "adapter", tmp_path / "base")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name: x.tolist() for name, x in stored.items()} == {f"base_model.model.{name}": x.tolist() for name, x in adapter_of(decoder).items()}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["target_modules"]) == ("LORA", lora.rank, lora.alpha, list(lora.target_modules))
    served = load_adapter(tmp_path / "adapter", shapes.exported, max_rank=8)
    assert {module for _, module in served.matrices} == set(lora.target_modules)
    base = decoder_of(shapes.exported)
    layers = stack([None, served], base.shapes, base.kernels, 8, base.embed_tokens.detach())
    assert torch.equal(hidden_of(base, lora_batch(layers, torch.ones(len(TOKENS), dtype=torch.int64), 2)), hidden_of(decoder))
    weights, merged = dict(to_huggingface(decoder)), dict(merged_tensors(dict(to_huggingface(decoder)), adapter_of(decoder), decoder.shapes))
    assert merged.keys() == {name for name in weights if ".lora_" not in name}
    for name, tensor in merged.items():
        expected, own = weights[name].double(), name.removesuffix(".weight")
        if f"{own}.lora_A.weight" in weights:
            expected = expected + lora.scale * weights[f"{own}.lora_B.weight"].double() @ weights[f"{own}.lora_A.weight"].double()
            assert own.rpartition(".")[2] in lora.target_modules
        assert torch.allclose(tensor.double(), expected, atol=1e-6), name


@pytest.mark.parametrize("shapes", CASES.values(), ids=CASES.keys())
def test_peft_loads_the_exported_adapter_and_has_the_logits_of_the_trainer(shapes: ModelShapes, tmp_path: Path) -> None:
    decoder = decoder_of(shapes)
    save_model(decoder, tmp_path / "base", tensors=[(name, x) for name, x in to_huggingface(decoder) if ".lora_" not in name])
    save_adapter(adapter_of(decoder), decoder.shapes, tmp_path / "adapter", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager")
    plain = torch.cat([base(part.unsqueeze(0)).logits[0] for part in TOKENS.split(LENGTHS)])
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).double()
    theirs = torch.cat([loaded(part.unsqueeze(0)).logits[0] for part in TOKENS.split(LENGTHS)])
    ours = decoder.logits(hidden_of(decoder)).double()
    assert (theirs - plain).abs().max() > 0.1
    assert torch.allclose(ours, theirs, atol=1e-4)
