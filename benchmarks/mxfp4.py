"""What an engine gains by keeping the experts of a folder in MXFP4 in their 4 bits: tokens a second and bytes of weights against the decoded fp32 ones.

The model is a random gpt-oss of 4 layers with 16 experts of 1,024 by 1,024, of which a token has 4. Both engines hold the same numbers and draw the same
tokens, which is checked. Each batch is decoded for as many steps by both in turns; medians over the rounds are reported,
and the smallest and largest ratio of a round.

    python benchmarks/mxfp4.py [--threads 1] [--out benchmarks/results]
"""

import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from machine import machine, write_report
from options import parser

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import load_tensors, read_tensors, save_model
from tandem.model.huggingface.safetensors_file import read_file, write_file
from tandem.model.initialise import initialise
from tandem.model.quantization.load import held_bytes

BATCHES, STEPS, ROUNDS = (1, 4, 8, 32), 16, 5
CONFIG = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}  # fmt: skip


def folder_in_mxfp4(parent: Path) -> Path:
    (parent / "config").mkdir()
    (parent / "config" / "config.json").write_text(json.dumps(CONFIG))
    decoder, folder = Decoder(read_shapes(parent / "config"), select("cpu")), parent / "model"
    initialise(decoder, 0)
    save_model(decoder, folder, like=parent / "config", dtype=torch.bfloat16)
    # Copies, because the file that is mapped is written again.
    tensors = {name: tensor.clone() for name, tensor in read_file(folder / "model.safetensors")}
    numbers = torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=numbers, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 121, (experts, rows, columns // 32), generator=numbers, dtype=torch.uint8)
    write_file(folder / "model.safetensors", tensors.items())
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}))
    return folder


def decoded(llm: LLM, batch: int) -> tuple[float, list[tuple[int, ...]]]:
    """Returns the tokens a second, and the tokens."""
    prompts = [{"prompt_token_ids": [5 + i, 9, 30 + i]} for i in range(batch)]
    start = time.perf_counter()
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True), use_tqdm=False)
    return batch * STEPS / (time.perf_counter() - start), [tuple(answer.outputs[0].token_ids) for answer in answers]


def table(folder: Path, threads: int) -> list[str]:
    torch.set_num_threads(threads)
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_tokens": 8192, "enable_prefix_caching": False}
    named = f"{threads} thread{'s' if threads > 1 else ''}: batch"
    lines = [f"| {named} | decoded, tokens/s | 4 bits, tokens/s | ratio | of rounds |", "| --- | --- | --- | --- | --- |"]
    with LLM(str(folder), **options) as coded, LLM(str(folder), **options) as plain:
        plain.engine.decoder.experts_in_mxfp4 = False
        load_tensors(plain.engine.decoder, read_tensors(folder), pack=True)
        for batch in BATCHES:
            assert decoded(coded, batch)[1] == decoded(plain, batch)[1]
            rounds = [(decoded(plain, batch)[0], decoded(coded, batch)[0]) for _ in range(ROUNDS)]
            before, after = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
            ratios = sorted(b / a for a, b in rounds)
            lines.append(f"| {batch} | {before:,.1f} | {after:,.1f} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
            print(lines[-1], flush=True)
        sizes = [held_bytes(llm.engine.decoder) / 2**20 for llm in (plain, coded)]
    return [*lines, "", f"Weights of the engine: {sizes[0]:,.0f} MiB decoded, {sizes[1]:,.0f} MiB in 4 bits.", ""]


def main() -> None:
    options = parser(__doc__, threads=(1,)).parse_args()
    with TemporaryDirectory() as made:
        folder = folder_in_mxfp4(Path(made))
        lines = [line for threads in options.threads for line in table(folder, threads)]
    text = ["# Experts in MXFP4", "", machine(), "", *__doc__.split("\n\n")[1:2], "", *lines]
    print(f"wrote {write_report('mxfp4', chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()
