"""Quantized folders of every listed family: what calibration sees, and what is computed with the codes, against transformers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from listed_families import SEQUENCES, Tiny, logits_of, packed_hidden, peer_logits
from torch import Tensor, nn

from tandem.kernels import select
from tandem.kernels.quantized import plain_weight
from tandem.layout.expert_shapes import SHARED_GATE
from tandem.layout.quantizable import cannot
from tandem.model.family import all_families
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.model_folder import load_model, load_tensors, save_model
from tandem.model.huggingface.safetensors_file import read_file, write_file
from tandem.model.huggingface.weight_files import tensor_names
from tandem.model.layer import factor_of_norm
from tandem.model.quantization.awq_layer import sampled_inputs, scale_layer
from tandem.model.quantization.calibration import after_layer, chunks_of, inputs_of
from tandem.model.quantization.formats import read_format
from tandem.model.quantization.load import load_quantized, projections_of
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.model.quantization.scheme import Scheme, round_to_nearest
from tandem.model.quantization.writing import CALIBRATED, Method, stored_tensors
from tandem.planner.model_sizes import read_model_sizes
from tandem.types import UserError


def test_calibration_sees_what_the_modules_of_transformers_read_and_computes_what_the_decoder_computes(tiny: Tiny) -> None:
    decoder, tokens, read = load_model(tiny.folder, select("reference")), SEQUENCES[0], dict[str, Tensor]()
    keep = lambda name: lambda module, given: read.__setitem__(name, given[0].flatten(0, -2))
    hooks = [module.register_forward_pre_hook(keep(name)) for name, module in tiny.peer.named_modules() if isinstance(module, nn.Linear)]
    peer_logits(tiny.peer, [tokens])
    for hook in hooks:
        hook.remove()
    (chunk,), compared = chunks_of(decoder, [tokens]), 0
    for index in decoder.layer_numbers:
        for linear, modules in projections_of(decoder, index):
            if modules[0] in read and linear.weight is not None and not decoder._layers()[index].is_by_head(linear):
                torch.testing.assert_close(inputs_of(decoder, index, linear.weight, chunk), read[modules[0]], rtol=1e-3, atol=3e-4)
                compared += 1
        chunk = after_layer(decoder, index, chunk)
    assert compared >= 2 * len(decoder.layer_numbers)
    with torch.no_grad():
        norm = factor_of_norm(decoder.norm.weight, decoder.shapes.norms_from_one)
        hidden = decoder.kernels.rms_norm(chunk.residual, norm, decoder.shapes.rms_norm_eps, decoder.shapes.centred_norms)
        assert torch.equal(hidden, packed_hidden(decoder, [tokens]))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", pytest.param("deepseek_v2", marks=pytest.mark.full)])
def test_awq_scales_what_the_output_of_latent_and_linear_attention_reads_and_changes_no_logits_before_it_rounds(
    family: str, tiny_of: Callable[[str], Tiny]
) -> None:
    decoder = load_model(tiny_of(family).folder, select("reference"))
    shapes, index, scheme = decoder.shapes, 1, Scheme("int4", 0)
    layer = decoder._layers()[index]
    assert layer.o_proj is not None and layer.o_proj.weight is not None
    with torch.no_grad():
        # Some channels stand out, in all heads of linear attention.
        if shapes.latent is not None:
            assert layer.latent is not None and layer.latent.kv_b_proj.weight is not None
            nope, size = shapes.latent.qk_nope_head_dim, shapes.latent.qk_nope_head_dim + shapes.latent.v_head_dim
            layer.latent.kv_b_proj.weight.view(-1, size, shapes.latent.kv_lora_rank)[:, nope::5] *= 40
        else:
            assert layer.linear_attention is not None
            layer.linear_attention.norm[::5] *= 40
        exact, before = logits_of(decoder), {name: p.detach().clone() for name, p in decoder.named_parameters()}
        chunks = list(chunks_of(decoder, SEQUENCES[::2] * 4))
        chunks = [after_layer(decoder, 0, chunk) for chunk in chunks]
        read = sampled_inputs(chunks, lambda chunk: inputs_of(decoder, index, layer.o_proj.weight, chunk))
        scale_layer(decoder, index, chunks, scheme, torch.float32)
        torch.testing.assert_close(logits_of(decoder), exact, rtol=1e-3, atol=1e-3)
        output, own = f"layers.{index}.o_proj.weight", dict(decoder.named_parameters())
        scales = (own[output] / before[output]).double().median(0).values
        assert scales.max() / scales.min() > 2, "the channels that stand out have larger scales"
        if shapes.latent is not None:
            changed = own[f"layers.{index}.latent.kv_b_proj.weight"] / before[f"layers.{index}.latent.kv_b_proj.weight"]
            changed = changed.view(-1, size, shapes.latent.kv_lora_rank)
            assert (changed[:, :nope] == 1).all() and (changed.log2() == changed.log2().round()).all(), "what stays plain is multiplied without rounding"
        else:
            torch.testing.assert_close(scales.float(), (before[name := f"layers.{index}.linear_attention.norm"] / own[name]).repeat(4), rtol=1e-4, atol=1e-4)
        wanted = read @ before[output].t()
        nearest = plain_weight(round_to_nearest(before[output], scheme)).float()
        scaled = plain_weight(round_to_nearest(own[output], scheme)).float() / scales.float()
        errors = [float((read @ rounded.t() - wanted).square().mean()) for rounded in (scaled, nearest)]
        assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("method", ["int8", *(pytest.param(method, marks=pytest.mark.full) for method in CALIBRATED)])
def test_a_quantized_folder_is_near_to_the_float_one(tiny: Tiny, method: Method, tmp_path: Path) -> None:
    decoder = load_model(tiny.folder, select("reference"))
    quantize = lambda: quantize_folder(
        tiny.folder, tmp_path / method, QuantizeOptions(method, group_size=0), select("reference"), SEQUENCES[::2] * 4, lambda done, of: None
    )
    if (reason := cannot(decoder.shapes, method)) is not None:
        with pytest.raises(UserError, match=re.escape(f"has {reason}; choose another method")):
            quantize()
        return
    shapes = decoder.shapes
    if method == "awq" and not (shapes.parallel_blocks or shapes.post_norms or shapes.experts or shapes.latent):
        pytest.skip("AWQ of plain blocks one behind the other has tests of its own")
    quantize()
    stored = read_format(tmp_path / method)
    assert stored is not None
    exact, quantized = logits_of(decoder), logits_of(load_quantized(tmp_path / method, stored, select("reference")))
    # Relative to the spread of the logits: 8 bits, and 4 bits of weights that have no structure to lose. In a mixture a few tokens change their experts, and a
    # recurrence with random weights goes on with its errors; ``test_model_quantize_perplexity`` has trained ones.
    limit = {"int8": 0.08 if shapes.experts is None else 0.16, "gptq": 0.4, "awq": 0.45}[method] * (2.5 if shapes.linear_attention is not None else 1.0)
    assert 0 < (quantized - exact).square().mean().sqrt() / exact.std() < limit


def decoded(tiny: Tiny, folder: Path, into: Path) -> Any:
    """Returns the model of transformers with the weights that compressed-tensors decodes from the 4 bits of ``folder``, which is written to ``into``."""
    unpack_from_int32 = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    packed = dict(read_file(folder / "model.safetensors"))
    for weight in [name.removesuffix("_packed") for name in packed if name.endswith("weight_packed")]:
        codes = unpack_from_int32(packed.pop(f"{weight}_packed"), 4, torch.Size(packed.pop(f"{weight}_shape").tolist()))
        scales = packed.pop(f"{weight}_scale")
        packed[weight] = codes.float() * scales.repeat_interleave(32, 1)[:, : codes.shape[1]]
    plain = load_model(tiny.folder, select("reference"))
    if (mixture := all_families()[tiny.family].experts) is not None and mixture.stacked:
        load_tensors(plain, packed.items())
        save_model(plain, into, like=tiny.folder)
    else:
        shutil.copytree(tiny.folder, into)
        write_file(into / "model.safetensors", [*packed.items()])
    return transformers.AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()


def test_four_bits_are_computed_as_transformers_computes_what_compressed_tensors_decodes(tiny: Tiny, tmp_path: Path) -> None:
    quantize_folder(tiny.folder, tmp_path / "rtn", QuantizeOptions("rtn", group_size=32), select("reference"), [], lambda done, of: None)
    modules = [name.removesuffix("_packed") for name in tensor_names(tmp_path / "rtn") if name.endswith("weight_packed")]
    shapes = read_model_sizes(tiny.folder)
    if shapes.experts is not None:
        # Three matrices of each expert, under its own number; routers and the gate of shared experts are plain.
        of_experts = [name for name in modules if ".experts." in name]
        mixtures = sum(shapes.experts_of(layer) is not None for layer in range(shapes.num_hidden_layers))
        assert len(of_experts) == 3 * shapes.experts.num_experts * mixtures
        assert not any(name.endswith((f"{shapes.experts.names.router}.weight", SHARED_GATE)) for name in modules)
    if shapes.linear_attention is not None:
        linear = {name.rpartition("linear_attn.")[2] for name in modules if "linear_attn." in name}
        assert linear == {"in_proj_qkvz.weight", "out_proj.weight"}
    peer, stored = decoded(tiny, tmp_path / "rtn", tmp_path / "decoded"), read_format(tmp_path / "rtn")
    assert stored is not None
    ours, theirs = logits_of(load_quantized(tmp_path / "rtn", stored, select("reference"))), peer_logits(peer)
    assert theirs.std() > 0.1 and (ours - theirs).abs().max() < 1e-4
    assert (theirs - logits_of(load_model(tiny.folder, select("reference")))).abs().max() > 1e-2, "rounding changes the logits"


@pytest.mark.full
@pytest.mark.parametrize("left", ["all", "none"])
def test_a_hybrid_whose_linear_attention_others_left_plain_or_quantized_whole_is_read(tiny_of: Callable[[str], Tiny], tmp_path: Path, left: str) -> None:
    """The recipes of llm-compressor ignore all of it, GPTQModel none."""
    tiny = tiny_of("qwen3_next")
    quantize_folder(tiny.folder, tmp_path / "model", QuantizeOptions("rtn", group_size=32), select("reference"), [], lambda done, of: None)
    tensors, exact = ({name: tensor.clone() for name, tensor in read_file(folder / "model.safetensors")} for folder in (tmp_path / "model", tiny.folder))
    if left == "all":
        tensors = {name: tensor for name, tensor in tensors.items() if ".linear_attn." not in name}
        tensors |= {name: tensor for name, tensor in exact.items() if ".linear_attn." in name}
    else:
        for name in [name for name in tensors if name.endswith("in_proj_ba.weight")]:
            whole = round_to_nearest(tensors.pop(name), Scheme("int4", 32))
            tensors |= dict(stored_tensors("rtn", name.removesuffix(".weight"), whole))
    write_file(tmp_path / "model" / "model.safetensors", [*tensors.items()])
    config = read_json(tmp_path / "model" / "config.json")
    further = ["re:.*linear_attn.*"] if left == "all" else []
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", *further]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    peer, stored = decoded(tiny, tmp_path / "model", tmp_path / "decoded"), read_format(tmp_path / "model")
    assert stored is not None
    assert (logits_of(load_quantized(tmp_path / "model", stored, select("reference"))) - peer_logits(peer)).abs().max() < 1e-4
