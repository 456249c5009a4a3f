"""GPTQ against its equations in float64, GPTQ and AWQ against rounding to nearest, and round trips of folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels import select
from tandem.kernels.quantized import QuantizedWeight, plain_weight
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model, read_tensors, save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.quantization import calibration, load, quantize
from tandem.model.quantization.awq import clip, fold_into_norm, search_scales
from tandem.model.quantization.bits import AWQ_ORDER, pack_words, unpack_words
from tandem.model.quantization.formats import read_format
from tandem.model.quantization.gptq import Hessian, gptq, reconstruction_error
from tandem.model.quantization.load import load_quantized
from tandem.model.quantization.quantize import METHODS, QuantizeOptions, quantize_folder
from tandem.model.quantization.scheme import Scheme, round_to_nearest, scheme_named
from tandem.types import UserError

FOUR = Scheme("int4", 32)


def correlated_inputs(tokens: int, columns: int) -> Tensor:
    """Returns inputs like those of a trained network: correlated, with outlier channels."""
    x = torch.randn(tokens, columns // 4) @ torch.randn(columns // 4, columns) + 0.3 * torch.randn(tokens, columns)
    x[:, ::17] *= 12
    return x


def direct_gptq(weight: Tensor, hessian: Tensor, group: int, order: Tensor) -> Tensor:
    """Equations 2 and 3 of Frantar et al.: the whole inverse, with a column removed after each step."""
    w, inverse = weight.double()[:, order].clone(), hessian.double()[order][:, order]
    inverse = torch.linalg.inv(inverse + 0.01 * inverse.diagonal().mean() * torch.eye(len(inverse)))
    for i in range(w.shape[1]):
        if i % group == 0:
            scale = w[:, i : i + group].abs().amax(1) / 7.5
        quantised = ((w[:, i] / scale).round().clamp(-8, 7)) * scale
        error = (w[:, i] - quantised) / inverse[i, i]
        w[:, i + 1 :] -= error.unsqueeze(1) * inverse[i, i + 1 :]
        w[:, i] = quantised
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return torch.empty_like(w).index_copy_(1, order, w)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, 0])
def test_gptq_is_its_equations_in_float64(act_order: bool, group: int) -> None:
    torch.manual_seed(1)
    weight, hessian = torch.randn(24, 160), Hessian(160)
    x = correlated_inputs(600, 160)
    hessian.add(x[:400])
    hessian.add(x[400:])
    torch.testing.assert_close(hessian.mean().double(), 2 * x.double().t() @ x.double() / 600, rtol=1e-4, atol=1e-2)
    found = gptq(weight, hessian.mean(), Scheme("int4", group), act_order=act_order)
    order = hessian.mean().diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(160)
    truth = direct_gptq(weight, hessian.mean(), group or 160, order)
    # A column that rounds to the other side of a half changes those after it, so nearly all columns and the error must agree.
    same = ((plain_weight(found).double() - truth).abs() < 1e-3).float().mean()
    assert same > 0.97
    direct = ((weight.double() - truth) @ hessian.mean().double() * (weight.double() - truth)).sum()
    assert reconstruction_error(weight, found, hessian.mean()) == pytest.approx(float(direct), rel=0.05)


def test_gptq_keeps_the_outputs_better_than_rounding_to_nearest() -> None:
    torch.manual_seed(2)
    weight, hessian = torch.randn(64, 256), Hessian(256)
    hessian.add(correlated_inputs(2000, 256))
    nearest = reconstruction_error(weight, round_to_nearest(weight, FOUR), hessian.mean())
    plain = reconstruction_error(weight, gptq(weight, hessian.mean(), FOUR), hessian.mean())
    ordered = reconstruction_error(weight, gptq(weight, hessian.mean(), FOUR, act_order=True), hessian.mean())
    assert plain < 0.5 * nearest
    assert ordered < 0.5 * nearest


def test_gptq_with_a_channel_that_is_never_used_and_without_damping_enough_says_so() -> None:
    weight, hessian = torch.randn(8, 64), Hessian(64)
    x = torch.randn(500, 64)
    x[:, 5] = 0
    hessian.add(x)
    found = gptq(weight, hessian.mean(), FOUR)
    assert plain_weight(found)[:, 5].abs().max() == 0
    broken = torch.full((64, 64), -1.0) + torch.eye(64)
    with pytest.raises(UserError, match=r"--damping"):
        gptq(weight, broken, FOUR)


def test_awq_scales_keep_the_outputs_where_channels_stand_out() -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(48, 128), torch.randn(400, 128)
    x[:, [3, 40, 77]] *= 50
    scheme = Scheme("int4", 32, symmetric=False)
    scales = search_scales(weight, x, scheme)
    assert scales[[3, 40, 77]].min() > scales.median()

    def error(rounded: Tensor) -> float:
        return float((x.double() @ (rounded - weight).double().t()).square().mean())

    nearest = error(plain_weight(round_to_nearest(weight, scheme)))
    scaled = error(plain_weight(round_to_nearest(weight * scales, scheme)) / scales)
    assert scaled < 0.5 * nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("from_one", [False, True])
def test_what_a_norm_takes_over_is_what_its_stored_weights_divide_by(dtype: torch.dtype, from_one: bool) -> None:
    torch.manual_seed(5)
    before = (torch.randn(200) * 0.3 + (0.0 if from_one else 1.0)).to(dtype).float()
    before[:3] = torch.tensor([-1.0, -0.996, 0.0])  # Of Gemma's norms, which multiply with 1 plus them: 0, nearly 0 and 1.
    norm, wanted = torch.nn.Parameter(before.clone(), requires_grad=False), torch.rand(200) * 3 + 0.2
    scales, one = fold_into_norm(norm, wanted, from_one, dtype), float(from_one)
    assert torch.equal(norm.to(dtype).float(), norm), "the folder has the same numbers"
    torch.testing.assert_close((norm.double() + one) * scales.double(), before.double() + one, rtol=1e-6, atol=1e-7)
    # Channels near -1 have what 16 bits have there, or stay as they are.
    assert ((scales / wanted - 1).abs() < 0.05).float().mean() > 0.9


def test_clipping_never_makes_a_group_worse() -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(40, 64), torch.randn(300, 64)
    weight[:, ::32] *= 6
    scheme = Scheme("int4", 32)
    before, after = (plain_weight(round_to_nearest(w, scheme)) - weight for w in (weight, clip(weight, x, scheme)))
    for run in (slice(0, 32), slice(32, 64)):
        errors = [((x[:, run] @ d[:, run].t()) ** 2).sum(0) for d in (before, after)]
        assert (errors[1] <= errors[0] * 1.0001).all()
        assert errors[1].sum() < 0.97 * errors[0].sum()


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("int4", 7.5), ("fp8", None)])
def test_rounding_to_nearest_stays_within_half_a_step(kind: str, steps: float | None) -> None:
    weight = torch.randn(30, 100) * torch.logspace(-4, 4, 30).unsqueeze(1)
    weight[7] = 0
    scheme = Scheme("int4", 32) if kind == "int4" else scheme_named(kind)
    error = (plain_weight(round_to_nearest(weight, scheme)) - weight).abs()
    for run, part in zip(weight.split(scheme.group_size or 100, 1), error.split(scheme.group_size or 100, 1), strict=True):
        largest = run.abs().amax(1, keepdim=True)
        # The largest positive element of a symmetric int4 is at 7.5 steps, half a step above the highest code.
        bound = largest / steps * 0.501 if steps else (run.abs() / 16).maximum(largest / 448 / 1024) * 1.001
        assert (part <= bound + 1e-30).all()
    assert error[7].max() == 0


def test_nibbles_go_round() -> None:
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    for order in (tuple(range(8)), AWQ_ORDER):
        assert torch.equal(unpack_words(pack_words(codes, order), 24, order), codes)
    assert torch.equal(unpack_words(pack_words(codes[:, :21]), 21), codes[:, :21])


SHAPES = {
    "llama": ModelShapes("llama", 61, 64, 2, 4, 4, 16, 96, 64, False, mlp_bias=True, attention_bias=True, output_bias=True),
    "qwen3": ModelShapes("qwen3", 61, 64, 2, 4, 2, 32, 96, 64, True, qk_norm=True),
}


def float_folder(folder: Path, architecture: str) -> Path:
    decoder = Decoder(SHAPES[architecture], select("reference"))
    initialise(decoder, 1)
    with torch.no_grad():
        for name, tensor in to_huggingface(decoder):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
            tensor.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.12 * noise)
    save_model(decoder, folder, eos_token_id=2)
    return folder


def tokens_of(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 61, (48,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize(("method", "act_order"), [*((method, False) for method in METHODS), ("gptq", True)])
def test_a_quantised_folder_loads_as_what_was_calculated(
    tmp_path: Path, packed_logits: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch, method: Any, architecture: str, act_order: bool
) -> None:
    source, target = float_folder(tmp_path / "float", architecture), tmp_path / "quantised"
    made: dict[str, QuantizedWeight] = {}
    real = quantize._all_tensors
    monkeypatch.setattr(quantize, "_all_tensors", lambda decoder, found, *rest: made.update(found) or real(decoder, found, *rest))
    seen: list[tuple[int, int]] = []
    options = QuantizeOptions(method, group_size=32, act_order=act_order)
    quantize_folder(source, target, options, select("reference"), tokens_of(), lambda *at: seen.append(at))
    assert seen == [(1, 2), (2, 2)]
    stored = read_format(target)
    assert stored is not None
    loaded: dict[str, QuantizedWeight] = {}
    read = load.read_weight
    monkeypatch.setattr(load, "read_weight", lambda module, *rest: loaded.setdefault(module, read(module, *rest)))
    decoder = load_quantized(target, stored, select("reference"))
    assert made.keys() == loaded.keys()
    for module, weight in made.items():
        assert torch.equal(plain_weight(loaded[module]), plain_weight(weight)), module
    tokens = tokens_of(2)
    plain = load_model(source, select("reference"))
    for ours, truth in zip(packed_logits(decoder, tokens), packed_logits(plain, tokens), strict=True):
        limit = {"int8": 0.05, "fp8": 0.15}.get(method, 0.45)
        assert (ours - truth).norm() / truth.norm() < limit


@pytest.mark.parametrize("method", ["int8", "fp8", "rtn"])
def test_transformers_loads_a_quantised_folder(tmp_path: Path, packed_logits: Callable[..., list[Tensor]], method: Any) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    source, target = float_folder(tmp_path / "float", "qwen3"), tmp_path / "quantised"
    quantize_folder(source, target, QuantizeOptions(method, group_size=32), select("reference"), [], lambda *at: None)
    peer = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    stored = read_format(target)
    assert stored is not None
    tokens = tokens_of(1)
    ours = packed_logits(load_quantized(target, stored, select("reference")), tokens)[0]
    theirs = peer(tokens[0].unsqueeze(0)).logits[0]
    # compressed-tensors divides int8 inputs by max / 127.5 and Tandem by max / 127, so their roundings differ.
    assert (ours - theirs).norm() / theirs.norm() < {"rtn": 2e-5, "fp8": 0.02, "int8": 0.05}[method]


def test_an_interrupted_run_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    source, target = float_folder(tmp_path / "float", "qwen3"), tmp_path / "quantised"
    leftover = tmp_path / ".quantised.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half a file")

    def die(done: int, layers: int) -> None:
        raise KeyboardInterrupt

    options = QuantizeOptions("int8")
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, target, options, select("reference"), [], die)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["float"]
    quantize_folder(source, target, options, select("reference"), [], lambda *at: None)
    with pytest.raises(UserError, match="already exists"):
        quantize_folder(source, target, options, select("reference"), [], lambda *at: None)
    assert json.loads((target / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (QuantizeOptions("hqq"), ["--method", "hqq"]),  # type: ignore[arg-type]
        (QuantizeOptions("gptq", bits=3), ["--bits", "3"]),
        (QuantizeOptions("awq", group_size=48), ["--group-size", "48"]),
        (QuantizeOptions("gptq", damping=0.0), ["--damping", "0.0"]),
        (QuantizeOptions("awq"), ["--calibration"]),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(tmp_path: Path, options: QuantizeOptions, words: list[str]) -> None:
    source = float_folder(tmp_path / "float", "qwen3")
    with pytest.raises(UserError) as caught:
        quantize_folder(source, tmp_path / "out", options, select("reference"), [], lambda *at: None)
    assert all(word in str(caught.value) for word in words)


def test_calibration_text_is_cut_into_sequences_with_the_end_held_out(tmp_path: Path) -> None:
    from tandem.text.characters import make_character_tokenizer
    from tandem.text.tokenizer import Tokenizer

    make_character_tokenizer("abc .", tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "abc abc. " * 10}) + "\n" for _ in range(10)))
    texts = calibration.read_texts(file)
    used, held_out = calibration.sequences_of(texts, tokenizer, 20, 32)
    assert (len(used), len(held_out)) == (20, 5)
    assert {len(s) for s in [*used, *held_out]} == {32}
    with pytest.raises(UserError, match="give more text"):
        calibration.sequences_of(texts[:1], tokenizer, 20, 200)
    file.write_text('{"text": "a"}\n{"nothing": 1}\n')
    with pytest.raises(UserError, match="line 2"):
        calibration.read_texts(file)


def test_perplexity_is_that_of_transformers(peer_model: Callable[..., Any]) -> None:
    from tandem.model.huggingface.model_folder import load_tensors, read_shapes

    peer = peer_model("llama", hidden_size=64, tie_word_embeddings=False)
    tokens = tokens_of(3)
    with torch.no_grad():
        losses = [peer(t.unsqueeze(0), labels=t.unsqueeze(0)).loss.double() for t in tokens]
    truth = float(torch.stack(losses).mean().exp())
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        decoder = Decoder(read_shapes(folder), select("reference"))
    load_tensors(decoder, peer.state_dict().items())
    assert calibration.perplexity(decoder, tokens) == pytest.approx(truth, rel=1e-4)


def test_experts_are_calibrated_on_the_tokens_that_transformers_routes_to_them(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2, "head_dim": 16}
    peer, tokens = peer_model("qwen3_moe", **sizes), tokens_of(4)
    peer.save_pretrained(tmp_path / "float")
    decoder, read = load_model(tmp_path / "float", select("reference")), list[Tensor]()
    handle = peer.model.layers[0].mlp.register_forward_hook(lambda module, given, out: read.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        for sequence in tokens:
            peer(sequence.unsqueeze(0))
        x, probabilities = torch.cat(read), (torch.cat(read) @ peer.model.layers[0].mlp.gate.weight.t()).softmax(-1)
    handle.remove()
    chosen = probabilities.topk(2).indices
    (chunk,) = calibration.chunks_of(decoder, tokens)
    rows, inner, bounds = calibration.routed_inputs(decoder, 0, chunk)
    experts = decoder._layers()[0].experts
    assert experts is not None and experts.gate_up_proj is not None
    for expert in range(6):
        own, part = x[(chosen == expert).any(1)], slice(bounds[expert], bounds[expert + 1])
        torch.testing.assert_close(rows[part], own, rtol=1e-4, atol=1e-4)
        gate, up = (own @ experts.gate_up_proj[expert].t()).chunk(2, dim=1)
        torch.testing.assert_close(inner[part], torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-3)


def test_experts_with_few_tokens_are_rounded_and_named_and_the_others_keep_their_outputs_better(peer_model: Callable[..., Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1, "head_dim": 16}
    peer = peer_model("qwen3_moe", **sizes)
    with torch.no_grad():
        # The inputs of the router are a norm's, so an expert that is against their mean has few tokens.
        peer.model.embed_tokens.weight.add_(0.5)
        peer.model.layers[0].mlp.gate.weight[4] = -0.5
    peer.save_pretrained(tmp_path / "float")
    before, tokens = load_model(tmp_path / "float", select("reference")), tokens_of()
    rounded = quantize_folder(tmp_path / "float", tmp_path / "gptq", QuantizeOptions("gptq", group_size=32), select("reference"), tokens, lambda *at: None)
    at = "model.layers.0.mlp.experts."
    assert [name for name in rounded if f"{at}4." in name] == [f"{at}4.gate_proj", f"{at}4.up_proj", f"{at}4.down_proj"] and len(rounded) <= 6
    stored = read_format(tmp_path / "gptq")
    assert stored is not None
    tensors = dict(read_tensors(tmp_path / "gptq"))
    (chunk,) = calibration.chunks_of(before, tokens)
    routed = calibration.routed_inputs(before, 0, chunk)
    own = dict(to_huggingface(before))
    for expert in range(6):
        weight, hessian = own[f"{at}{expert}.up_proj.weight"], Hessian(64)
        hessian.add(routed.rows[routed.bounds[expert] : routed.bounds[expert + 1]])
        nearest = round_to_nearest(weight, Scheme("int4", 32, half_scales=True))
        read = load.read_weight(f"{at}{expert}.up_proj", stored, tensors, (32, 64))
        if f"{at}{expert}.up_proj" in rounded:
            assert torch.equal(plain_weight(read), plain_weight(nearest))
        else:
            assert reconstruction_error(weight, read, hessian.mean()) < 0.8 * reconstruction_error(weight, nearest, hessian.mean())


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_awq_of_a_mixture_changes_norms_and_no_bit_of_its_routers_logits(peer_model: Callable[..., Any], tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 2, "head_dim": 16}
    peer = peer_model("qwen3_moe", **sizes)
    with torch.no_grad():
        for layer in peer.model.layers:
            layer.post_attention_layernorm.weight[::7] *= 12
    peer.to(dtype).save_pretrained(tmp_path / "float")
    quantize_folder(tmp_path / "float", tmp_path / "awq", QuantizeOptions("awq", group_size=32), select("reference"), tokens_of(), lambda *at: None)
    before, after = (dict(read_tensors(tmp_path / kind)) for kind in ("float", "awq"))
    kernels, x = select("reference"), torch.randn(50, 64)
    for layer in range(2):
        norm, router = (f"model.layers.{layer}.{name}.weight" for name in ("post_attention_layernorm", "mlp.gate"))
        assert after[norm].dtype == after[router].dtype == dtype and not torch.equal(before[norm], after[norm])
        logits = [kernels.linear(kernels.rms_norm(x, tensors[norm].float(), 1e-6), tensors[router].float(), None) for tensors in (before, after)]
        assert torch.equal(*logits)
    plain = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert plain == [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
