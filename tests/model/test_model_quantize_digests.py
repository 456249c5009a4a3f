"""Digests of the weights of a quantized folder: they identify the engine's weights and change with them."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from tandem.kernels import select
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise
from tandem.model.quantization.formats import read_format
from tandem.model.quantization.load import held_bytes, load_quantized
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.model.weight_digests import packed_tensors, weight_digests

SHAPES = ModelShapes("qwen3", 61, 64, 2, 4, 2, 16, 96, 64, False, qk_norm=True)


def load(folder: Path) -> Decoder:
    stored = read_format(folder)
    assert stored is not None
    return load_quantized(folder, stored, select("reference"))


def test_one_changed_code_changes_one_digest(tmp_path: Path) -> None:
    decoder = Decoder(SHAPES, select("reference"))
    initialise(decoder, 0)
    save_model(decoder, tmp_path / "float", eos_token_id=2)
    quantize_folder(tmp_path / "float", tmp_path / "int8", QuantizeOptions("int8"), select("reference"), [], lambda *at: None)
    before = weight_digests(load(tmp_path / "int8"))
    assert before == weight_digests(load(tmp_path / "int8"))
    assert {"layers.1.down.data", "layers.1.down.scales", "embed_tokens", "layers.0.input_layernorm.weight"} <= before.keys()
    file = tmp_path / "int8" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    save_file(tensors, file)
    after = weight_digests(load(tmp_path / "int8"))
    assert {name for name in before if before[name] != after[name]} == {"layers.1.down.data"}


def test_a_packed_decoder_with_linear_attention_has_all_of_its_weights_in_its_digests() -> None:
    linear = LinearAttention((0,), 2, 4, 12, 10, 4)
    shapes = ModelShapes("qwen3_next", 61, 64, 2, 4, 2, 16, 96, 64, False, qk_norm=True, norms_from_one=True, attention_gate=True, linear_attention=linear)
    decoder = Decoder(shapes, select("reference"))
    initialise(decoder, 0)
    decoder.pack()
    assert sum(tensor.numel() for _, tensor in packed_tensors(decoder)) >= parameter_count(shapes)
    assert {"layers.0.qkvz.data", "layers.0.ba.data"} <= weight_digests(decoder).keys()


def test_the_bytes_held_are_those_of_the_codes_the_scales_and_what_stays_plain(tmp_path: Path) -> None:
    decoder = Decoder(SHAPES, select("reference"))
    initialise(decoder, 0)
    save_model(decoder, tmp_path / "float", eos_token_id=2)
    quantize_folder(tmp_path / "float", tmp_path / "int8", QuantizeOptions("int8"), select("reference"), [], lambda *at: None)
    rows = [(64 + 2 * 32, 64), (64, 64), (2 * 96, 64), (64, 96)]
    layer = sum(n * k + 4 * n for n, k in rows) + 4 * (2 * 64 + 2 * 16)
    assert held_bytes(load(tmp_path / "int8")) == 2 * layer + 4 * 64 + 2 * 4 * 61 * 64
