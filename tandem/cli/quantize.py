"""Quantize a model's weights to 8 or 4 bits, and measure the effect.

SRC is a float Hugging Face folder or a model of the Hugging Face Hub (OWNER/NAME), DST a new one that Tandem and other engines
can load: int8 and fp8 (weights and inputs, one scale per row) and rtn (4 bits, rounded to nearest) in the format
compressed-tensors, gptq and awq in formats of their own. gptq and awq need --calibration: a .jsonl file with the field "text",
or plain text. With any method the end of that text is held out, and its perplexity is measured before and after.

examples:
  tandem quantize models/qwen models/qwen-int8 --method int8
  tandem quantize models/qwen models/qwen-gptq --method gptq --bits 4 --group-size 128 --calibration text.jsonl
  tandem quantize models/qwen models/qwen-awq --method awq --calibration text.txt --samples 64 --sequence-length 256
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tandem.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

REPORT = "quantization_report.json"
SPEED_PROMPTS, SPEED_TOKENS = 8, 32


class Measured(NamedTuple):
    """The size, quality and speed of a model. ``bits``: per weight of the linear layers. ``perplexity``: ``None`` without text.
    ``tokens_per_s``: of decoding ``SPEED_PROMPTS`` sequences at once. ``memory_bytes``: of the weights in the engine."""

    bits: float
    file_bytes: int
    perplexity: float | None
    tokens_per_s: float
    memory_bytes: int


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a float Hugging Face folder, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("target", metavar="DST", help="the folder to write; must not exist")
    parser.add_argument("--method", required=True, help="int8, fp8, rtn, gptq or awq")
    parser.add_argument("--bits", type=int, default=4, help="bits per weight of rtn, gptq and awq: 4")
    parser.add_argument("--group-size", type=int, default=128, help="columns that share a scale: 32, 64, 128, or 0 for whole rows")
    parser.add_argument("--calibration", help="text to calibrate and measure with: .jsonl with the field 'text', or plain text")
    parser.add_argument("--samples", type=int, default=128, help="maximum number of calibration sequences (default: 128)")
    parser.add_argument("--sequence-length", type=int, help="tokens per sequence (default: 512, or the model's context if it is shorter)")
    parser.add_argument("--damping", type=float, default=0.01, help="gptq: share of the mean diagonal added to the Hessian")
    parser.add_argument("--act-order", action="store_true", help="gptq: columns with large inputs first (desc_act)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(options: argparse.Namespace) -> int:
    from tandem.kernels import select
    from tandem.model.huggingface.model_folder import read_shapes
    from tandem.model.model_source import find_model
    from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder

    chosen = QuantizeOptions(options.method, options.bits, options.group_size, options.damping, options.act_order)
    chosen.check()
    source, target = find_model(options.source), Path(options.target)
    positions = read_shapes(source).default_context
    if options.samples < 1:
        raise UserError(f"--samples is {options.samples}; it must be at least 1")
    length = min(512, positions) if options.sequence_length is None else options.sequence_length
    if not 2 <= length <= positions:
        raise UserError(f"--sequence-length is {length}; it must be from 2 to the model's {positions} positions")
    sequences, held_out = _sequences(options, source, length)
    rounded = quantize_folder(source, target, chosen, select(), sequences, _progress)
    if rounded:
        print(f"rounded to nearest, because too few calibration tokens are routed to them: {', '.join(rounded)}", file=sys.stderr)
    before, after = _measure(source, held_out), _measure(target, held_out)
    report = {"method": options.method, "before": before._asdict(), "after": after._asdict(), "rounded_to_nearest": rounded}
    (target / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report) if options.json else _table(options.method, before, after))
    return 0


def _sequences(options: argparse.Namespace, source: Path, length: int) -> "tuple[list[Tensor], list[Tensor]]":
    from tandem.model.quantization.calibration import read_texts, sequences_of
    from tandem.text.tokenizer import Tokenizer

    if options.calibration is None:
        return [], []
    texts, tokenizer = read_texts(options.calibration), Tokenizer.from_folder(source)
    return sequences_of(texts, tokenizer, options.samples, length)


def _progress(done: int, layers: int) -> None:
    if sys.stderr.isatty():
        bar = "#" * (30 * done // layers)
        print(f"\rquantized [{bar:<30}] {done} of {layers} layers", end="\n" if done == layers else "", file=sys.stderr, flush=True)


def _measure(folder: Path, held_out: "list[Tensor]") -> Measured:
    import torch

    from tandem.engine.llm import LLM
    from tandem.engine.sample.sampling_params import SamplingParams
    from tandem.layout.parameters import parameters
    from tandem.model.huggingface.model_folder import read_tensors
    from tandem.model.quantization.calibration import perplexity
    from tandem.model.quantization.load import held_bytes

    files = bytes_of_linears = weights = 0
    for name, tensor in read_tensors(folder):
        files += tensor.nbytes
        bytes_of_linears += tensor.nbytes if _is_of_matrix(name) else 0
    with LLM(folder, skip_tokenizer_init=True, max_num_seqs=SPEED_PROMPTS) as llm:
        decoder = llm.engine.decoder
        weights = sum(parameter.numel for parameter in parameters(decoder.shapes) if _is_of_matrix(parameter.name))
        length = max(1, min(SPEED_TOKENS, decoder.positions - 4))
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, decoder.shapes.vocab_size, (SPEED_PROMPTS, 2), generator=draw).tolist()
        asked = [{"prompt_token_ids": tokens} for tokens in prompts]
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            llm.generate(asked, params, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
        return Measured(
            bits=8 * bytes_of_linears / weights,
            file_bytes=files,
            perplexity=perplexity(decoder, held_out) if held_out else None,
            tokens_per_s=SPEED_PROMPTS * length / best,
            memory_bytes=held_bytes(decoder),
        )


def _is_of_matrix(name: str) -> bool:
    """Returns whether a tensor belongs to a linear layer of a layer or of an expert, by its name in a folder."""
    return ("_proj" in name or ".experts." in name) and not name.endswith(("bias", "_bias"))


def _table(method: str, before: Measured, after: Measured) -> str:
    rows = [("weights", "bits per weight", "file MB", "perplexity", "tokens/s", "memory MB")]
    for name, m in (("float", before), (method, after)):
        shown = "-" if m.perplexity is None else f"{m.perplexity:.3f}"
        rows.append((name, f"{m.bits:.2f}", f"{m.file_bytes / 1e6:.1f}", shown, f"{m.tokens_per_s:.0f}", f"{m.memory_bytes / 1e6:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
