"""Every format of quantized weights in one table: bits, memory, quality and speed.

Quality: perplexity on held-out text of a small Qwen3 that recipes/pretrain.yaml trains on Python's standard library (a few minutes, kept in the work
folder), rounded as it is loaded (``LLM(quantization=...)``), or by ``tandem quantize``, which calibrates on other files of the same text. Bits, memory and
speed: a random Qwen3 of 84 million parameters with a vocabulary of 8,192, rounded likewise; bits of a weight of its layers with their scales and zeros as
the kernels hold them, megabytes of all weights, new tokens per CPU second at one thread with 1, 8 and 64 sequences of 16 + 16 tokens, the formats in turn.
A format in brackets has the speed of the one that it names.

    python benchmarks/quantization_formats.py [--sequences 1 8 64] [--rounds 2] [--steps 300] [--out benchmarks/results]
"""

import argparse
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from machine import HERE, ROOT, machine, write_report

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.layout.parameters import parameter_count, parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise
from tandem.model.quantization.calibration import perplexity, sequences_of
from tandem.model.quantization.load import held_bytes
from tandem.model.quantization.quantize import QuantizeOptions, quantize_folder
from tandem.text.tokenizer import Tokenizer

SHAPES = ModelShapes("qwen3", 8192, 768, 10, 12, 4, 64, 2432, 256, True, qk_norm=True)
PROMPT, NEW = 16, 16
SAMPLES, HELD_OUT, LENGTH = 256, 128, 256
"""Sequences that a method is calibrated with, those whose perplexity is measured, and their tokens."""
TEXT = Path(sysconfig.get_path("stdlib"))
WIDTH = ("--model.create.hidden_size=256", "--model.create.num_attention_heads=8")
"""Two whole groups of 128 columns, which the recipe's own 192 are not."""


@dataclass(frozen=True, slots=True)
class Format:
    """``speed``: the ``quantization`` of an engine, by which bits, memory and speed are measured. ``options``: of ``tandem quantize``, by which the folder is
    written that the quality is measured with. ``name``: of both."""

    name: str
    speed: str | None
    options: QuantizeOptions | None = None


FORMATS = (
    *(Format(name or "fp32", name) for name in (None, "bf16", "fp16", "int8", "int8+head", "fp8", "w4a8", "w4a8+head", "int4", "nf4")),
    Format("rtn (int4)", "int4", QuantizeOptions("rtn")),
    Format("gptq (int4)", "int4", QuantizeOptions("gptq")),
    Format("gptq, act order (int4)", "int4", QuantizeOptions("gptq", act_order=True)),
    Format("gptq, act order, inputs of 8 bits (w4a8)", "w4a8", QuantizeOptions("gptq", act_order=True)),
    Format("awq (int4)", "int4", QuantizeOptions("awq")),
    Format("awq, inputs of 8 bits (w4a8)", "w4a8", QuantizeOptions("awq")),
)


def write_text(folder: Path) -> None:
    """Copies the standard library's files, each fiftieth to ``held_out``, the others to ``train``."""
    files = sorted(path for path in TEXT.rglob("*.py") if not {"site-packages", "test", "idlelib"} & set(path.relative_to(TEXT).parts))
    for number, path in enumerate(files):
        target = folder / ("train" if number % 50 else "held_out") / path.relative_to(TEXT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text(encoding="utf-8", errors="replace"), encoding="utf-8")


def trained(folder: Path, steps: int) -> Path:
    """The folder of a model of the standard library's text, made by the commands that head the recipe where it is missing."""
    model = folder / "run" / "model"
    if not model.exists():
        command, tokenizer = [sys.executable, "-m", "tandem.cli.main"], str(folder / "tokenizer")
        write_text(folder / "text")
        for side, vocabulary in (("train", ["--new-vocabulary", "4096"]), ("held_out", [])):
            made = [str(folder / "text" / side), str(folder / side), "--tokenizer", tokenizer, *vocabulary, "--suffix", ".py"]
            subprocess.run([*command, "tokenize", *made], check=True)
        given = [f"--model.create.tokenizer={tokenizer}", *WIDTH, f"--data.train=[{{path: {folder / 'train'}}}]", f"--data.held_out={folder / 'held_out'}"]
        given += [f"--run.max_steps={steps}", f"--run.directory={folder}", "--run.name=run"]
        subprocess.run([*command, "train", str(ROOT / "recipes" / "pretrain.yaml"), *given], check=True)
    return model


def token_sequences(folder: Path, tokenizer: Tokenizer, count: int) -> list[torch.Tensor]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    first, last = sequences_of(texts, tokenizer, count, LENGTH)
    return [*first, *last][:count]


def qualities(folder: Path, steps: int) -> dict[str, float]:
    """The held-out perplexity of each format."""
    model = trained(folder, steps)
    tokenizer = Tokenizer.from_folder(model)
    calibration, held_out = (token_sequences(folder / "text" / side, tokenizer, count) for side, count in (("train", SAMPLES), ("held_out", HELD_OUT)))
    measured: dict[str, float] = {}
    with TemporaryDirectory() as work:
        for kind in FORMATS:
            source, quantization = model, kind.speed
            if kind.options is not None:
                source = Path(work) / "-".join(str(part) for part in (kind.options.method, kind.options.act_order))
                quantization = kind.speed if kind.speed == "w4a8" else None
                if not source.exists():
                    quantize_folder(model, source, kind.options, select("cpu"), calibration, lambda *_: None)
            with LLM(source, quantization=quantization, skip_tokenizer_init=True, max_num_seqs=1) as llm:
                measured[kind.name] = perplexity(llm.engine.decoder, held_out)
            print(f"{kind.name}: {measured[kind.name]:.4f}", file=sys.stderr, flush=True)
    return measured


@dataclass(frozen=True, slots=True)
class Measured:
    """``bits`` of a weight of the layers; bytes of all weights; new tokens per CPU second by number of sequences."""

    bits: float
    bytes_held: int
    rates: dict[int, float]


def engines(sequences: list[int], rounds: int) -> dict[str | None, Measured]:
    """What each kind of ``LLM(quantization=...)`` holds and does."""
    layers = sum(each.numel for each in parameters(SHAPES) if "_proj" in each.name)
    with TemporaryDirectory() as folder:
        decoder = Decoder(SHAPES, select("cpu"))
        initialise(decoder, 0)
        rest = 4 * (parameter_count(SHAPES) - layers)
        save_model(decoder, Path(folder) / "model")
        kinds = list(dict.fromkeys(kind.speed for kind in FORMATS))
        llms = {kind: LLM(Path(folder) / "model", quantization=kind, max_num_seqs=max(sequences), max_model_len=PROMPT + NEW) for kind in kinds}
    draw = torch.Generator().manual_seed(0)
    seconds = {(kind, count): float("inf") for kind in kinds for count in sequences}
    for _ in range(rounds):
        for count in sequences:
            prompts = [{"prompt_token_ids": tokens} for tokens in torch.randint(0, SHAPES.vocab_size, (count, PROMPT), generator=draw).tolist()]
            for kind, llm in llms.items():
                start = time.process_time()
                llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True), use_tqdm=False)
                seconds[kind, count] = min(seconds[kind, count], time.process_time() - start)
    held = {kind: held_bytes(llm.engine.decoder) for kind, llm in llms.items()}
    plain = held[None] - rest - 4 * layers
    rates = {kind: {count: count * NEW / seconds[kind, count] for count in sequences} for kind in kinds}
    # With the head the layers are those without.
    bits = {kind: 8 * (held[kind and kind.removesuffix("+head")] - rest - plain) / layers for kind in kinds}
    return {kind: Measured(bits[kind], held[kind], rates[kind]) for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=2, help="times each engine does the work")
    parser.add_argument("--steps", type=int, default=300, help="of the training of the model whose quality is measured")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    described = machine()
    options.work.mkdir(parents=True, exist_ok=True)
    quality = qualities(options.work.absolute() / f"quantization-formats-{options.steps}", options.steps)
    torch.set_num_threads(1)
    speed = engines(options.sequences, options.rounds)
    head = ["format", "bits a weight", "MB", "of fp32", "perplexity", "change"]
    head += [f"{count} sequence{'s' * (count > 1)}, tokens / CPU s (x fp32)" for count in options.sequences]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for kind in FORMATS:
        own, base = speed[kind.speed], speed[None]
        cells = [kind.name, f"{own.bits:.2f}", f"{own.bytes_held / 1e6:.0f}", f"{own.bytes_held / base.bytes_held:.2f}"]
        cells += [f"{quality[kind.name]:.3f}", f"{100 * (quality[kind.name] / quality['fp32'] - 1):+.2f} %"]
        cells += [f"{own.rates[count]:.0f} ({own.rates[count] / base.rates[count]:.2f})" for count in options.sequences]
        lines.append("| " + " | ".join(cells) + " |")
    about = " ".join(__doc__.split("\n\n")[1].split("\n"))
    report = "\n".join(["# Formats of quantized weights", "", described, "", about, "", *lines])
    print(report)
    print(f"wrote {write_report('quantization-formats', report, options.out)}")


if __name__ == "__main__":
    main()
