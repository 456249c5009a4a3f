"""Folders that transformers wrote with bitsandbytes 0.50.2 on a CPU, and the logits of transformers on the weights that bitsandbytes decodes them to.

They were made of one Llama (seed 0, ``initializer_range`` 0.2) by ``from_pretrained(quantization_config=BitsAndBytesConfig(...))`` and ``save_pretrained``;
``logits.safetensors`` has the logits of the tokens ``7 i mod 61``, i < 20, of the float model with ``dequantize_4bit`` and ``int8_vectorwise_dequant`` in
the place of its matrices. In ``nf4-rows`` a block of 64 numbers ends inside of a row of 48 or 80, which the kernel of bitsandbytes for CPUs does not decode.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tandem import LLM, SamplingParams
from tandem.kernels import Kernels
from tandem.model.quantization.formats import read_format
from tandem.model.quantization.load import load_quantized
from tandem.types import UserError

FOLDERS = Path(__file__).parent / "bitsandbytes_folders"
TOKENS = torch.arange(20) * 7 % 61
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", ["nf4", "nf4-double", "int8"])
def test_logits_are_those_of_transformers_on_what_bitsandbytes_decodes(name: str, kernels: Kernels, packed_logits: Callable[..., list[Tensor]]) -> None:
    stored = read_format(FOLDERS / name)
    assert stored is not None
    ours = packed_logits(load_quantized(FOLDERS / name, stored, kernels), [TOKENS])[0]
    theirs = load_file(FOLDERS / "logits.safetensors")[name]
    assert (ours - theirs).norm() / theirs.norm() < 2e-6


def test_blocks_that_end_inside_of_a_row_are_those_of_the_published_formula(kernels: Kernels, packed_logits: Callable[..., list[Tensor]]) -> None:
    folder = FOLDERS / "nf4-rows"
    held, decoded = load_file(folder / "model.safetensors"), {}
    for name, tensor in held.items():
        if f"{name}.absmax" in held:
            numbers, scales = held[f"{name}.quant_map"].tolist(), held[f"{name}.absmax"].tolist()
            codes = [code for byte in tensor.flatten().tolist() for code in (byte // 16, byte % 16)]
            rows = json.loads(bytes(held[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))["shape"]
            decoded[name] = torch.tensor([numbers[code] * scales[i // 64] for i, code in enumerate(codes)]).view(rows)
        elif tensor.is_floating_point() and ".weight." not in name:
            decoded[name] = tensor
    peer = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    peer.load_state_dict(decoded)
    with torch.no_grad():
        theirs = peer(TOKENS.unsqueeze(0)).logits[0]
    stored = read_format(folder)
    assert stored is not None
    ours = packed_logits(load_quantized(folder, stored, kernels), [TOKENS])[0]
    assert (ours - theirs).norm() / theirs.norm() < 2e-6


def damaged(folder: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    shutil.copytree(FOLDERS / name, folder)
    kept = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({key: tensor for key, tensor in kept.items() if tensor.numel()}, folder / "model.safetensors")
    return folder


STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "tensors", "said"),
    [
        ("nf4", {STATE: torch.zeros(9, dtype=torch.uint8)}, "is not JSON"),
        ("nf4", {STATE: torch.tensor(list(b'{"blocksize": 0, "shape": [64, 128]}'), dtype=torch.uint8)}, "has blocksize 0"),
        ("nf4", {STATE: torch.tensor(list(b'{"blocksize": 64, "shape": [128, 64]}'), dtype=torch.uint8)}, "was quantized with shape"),
        ("nf4", {STATE: torch.empty(0)}, "is of no quant_state; only nf4 is supported"),
        ("nf4", {f"{DOWN}.absmax": torch.ones(3)}, "has shape [3]"),
        ("nf4", {f"{DOWN}.quant_map": torch.ones(16)}, "has other numbers than the 4-bit NormalFloat"),
        ("nf4", {DOWN: torch.zeros(7, 1, dtype=torch.uint8)}, "has 7 bytes; config.json requires 4096"),
        ("nf4-double", {f"{DOWN}.nested_absmax": torch.full((1,), float("nan"))}, "is not finite"),
        ("nf4-double", {f"{DOWN}.absmax": torch.ones(128)}, "double quantization has codes of 8 bits"),
        ("int8", {"model.layers.0.mlp.down_proj.SCB": torch.empty(0)}, "SCB' is missing"),
        ("int8", {"model.layers.0.mlp.down_proj.weight_format": torch.tensor([2], dtype=torch.uint8)}, "only 0 (rows) is supported"),
    ],
)
def test_a_damaged_folder_is_one_line_that_names_the_tensor(tmp_path: Path, name: str, tensors: dict[str, Tensor], said: str, kernels: Kernels) -> None:
    folder = damaged(tmp_path / "model", name, tensors)
    stored = read_format(folder)
    assert stored is not None
    with pytest.raises(UserError) as caught:
        load_quantized(folder, stored, kernels)
    assert said in str(caught.value) and "model.layers.0.mlp.down_proj" in str(caught.value) and "\n" not in str(caught.value)


def test_the_engine_generates_the_same_tokens_alone_and_in_a_batch() -> None:
    prompts = [{"prompt_token_ids": TOKENS[:n].tolist()} for n in (5, 20, 11)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(FOLDERS / "nf4-double"), skip_tokenizer_init=True) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
        alone = [llm.generate([prompt], sampling)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone and all(len(tokens) == 8 for tokens in together)
