"""Peak resident bytes of each rank under ZeRO 0 to 3, beside the formula and beside what a run predicts before it starts.

    python benchmarks/zero_memory.py [--ranks 2] [--model 300M] [--steps 2] [--stages 0 1 2 3]

Every row is a whole run of ``tandem train``: a model that is read from its folder, steps of two micro-batches, a checkpoint before the last step and one
after it, the exported model. The peak is the kernel's (``VmHWM``), so that loading, checkpoints and export count. "Formula": weights, gradients
and AdamW's moments as ZeRO cuts them (Rajbhandari et al., 2020), in fp32. "Predicted": ``tandem.estimate.training.rank_memory``, which is what the check before
a run asks for. There is no peer: the formula is what the rows are to be compared with.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import yaml
from machine import HERE, machine, write_report
from peers.clock import family

from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import load_config
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.data.tokenizing.train_tokenizer import train_tokenizer
from tandem.estimate.model_bytes import cut_by_zero, optimizer_bytes, weight_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes
from tandem.runtime.process.processes import peak_memory_of
from tandem.storage.files import open_storage

MODELS: dict[str, dict[str, int]] = {
    "1M": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "intermediate_size": 384},
    "12M": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1024},
    "100M": {"hidden_size": 1024, "num_hidden_layers": 9, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2816},
    "300M": {"hidden_size": 1280, "num_hidden_layers": 16, "num_attention_heads": 20, "num_key_value_heads": 10, "head_dim": 64,
    "intermediate_size": 3712},
}
TOKENS = 256
STAGES = (0, 1, 2, 3)
MEMORY_GIB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
"""All of the machine's: the check before a run would leave a fifth of what is free to others."""


def make_data(folder: Path) -> None:
    """A dataset and its tokenizer, of this package's own sources."""
    form = DocumentFormat(suffixes=(".py",))
    text = str(HERE.parent / "tandem" / "layout")
    train_tokenizer(open_storage(text), form, 300, folder / "tokenizer")
    tokenize(TokenizeSettings(text, str(folder / "data"), str(folder / "tokenizer"), form, workers=1))


def recipe(work: Path, name: str, steps: int) -> dict[str, Any]:
    return {
        "algorithm": {"name": "pretrain"},
        "model": {"create": {"architecture": "qwen3", "tokenizer": str(work / "tokenizer"), "max_position_embeddings": TOKENS,
        **MODELS[name]}},
        "data": {"train": [{"path": str(work / "data")}], "sequence_length": TOKENS, "global_batch_size": 4},
        "trainer": {"learning_rate": 1.0e-4, "micro_batch_tokens": TOKENS},
        "checkpoint": {"every_steps": max(1, steps - 1), "keep": 1},
        "run": {"max_steps": steps, "seed": 3, "directory": str(work)},
        "parallel": {"heartbeat_timeout_s": 600.0},
    }  # fmt: skip


def make_model(work: Path, name: str, steps: int) -> ModelShapes:
    """Writes the model and ``recipe.yaml``, which begins with it."""
    made = recipe(work, name, steps)
    (work / "recipe.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    loaded = load_config(work / "recipe.yaml")
    create_model(loaded.model.create, 3, work / "model")  # type: ignore[union-attr, arg-type]
    (work / "recipe.yaml").write_text(yaml.safe_dump(made | {"model": {"path": str(work / "model")}}), encoding="utf-8")
    return read_shapes(work / "model")


def peaks_of_run(work: Path, ranks: int, zero: int) -> list[int]:
    """The peak resident bytes of each rank of one run."""
    name = f"zero-{zero}"
    overrides = ["--machine.threads=2", f"--machine.memory_gib={MEMORY_GIB}", f"--run.name={name}", f"--parallel.data={ranks}", f"--parallel.zero={zero}"]
    log = work / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, "-m", "tandem.cli.main", "train", str(work / "recipe.yaml"), *overrides], stdout=file, stderr=file)
        found: dict[int, int] = {}
        while process.poll() is None:
            for pid in rank_pids(process.pid):
                try:
                    found[pid] = max(found.get(pid, 0), peak_memory_of(pid))
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
    if process.returncode or len(found) != ranks:
        raise RuntimeError(f"{name}: exit status {process.returncode}, {len(found)} ranks seen\n{log.read_text(encoding='utf-8')}")
    return [found[pid] for pid in sorted(found)]


def rank_pids(pid: int, target: bytes = b"rank_process") -> list[int]:
    """The ranks below the command ``pid``, which its fork server has started, whose command lines have ``target``. A process that a rank
    starts has the rank's command line at first."""
    ranks: list[int] = []
    for child in family(pid):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{child}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1])
            if target in Path(f"/proc/{child}/cmdline").read_bytes() and parent not in ranks:
                ranks.append(child)
    return ranks


def predictions(work: Path, shapes: ModelShapes, ranks: int, zero: int) -> tuple[int, int]:
    """(bytes of the formula, of the prediction) of one rank."""
    trainer = load_config(work / "recipe.yaml").trainer
    formula = cut_by_zero(weight_bytes(shapes, "float32"), optimizer_bytes(shapes), ranks, zero)
    parallel = ParallelConfig(data=ranks, zero=zero)  # type: ignore[arg-type]
    return formula, predict_rank_memory(shapes, layout_of_trainer(trainer, parallel, TOKENS)).total


def row(work: Path, shapes: ModelShapes, ranks: int, zero: int) -> str:
    formula, predicted = predictions(work, shapes, ranks, zero)
    peaks = peaks_of_run(work, ranks, zero)
    cells = [f"{value / 2**20:,.0f}" for value in (formula, predicted, *peaks)]
    return f"| {zero} | {' | '.join(cells)} | {max(peaks) / predicted:.2f} |"


def report(described: str, shapes: ModelShapes, ranks: int, steps: int, lines: list[str]) -> str:
    head = [f"rank {rank}, peak" for rank in range(ranks)]
    return "\n".join([
        "# Peak resident bytes of ranks under ZeRO", "", described, "",
        f"A Qwen3 of {parameter_count(shapes) / 1e6:,.0f}M parameters, fp32, AdamW, {ranks} data-parallel ranks, {steps} steps of two micro-batches "
        f"of {TOKENS} tokens a rank, MiB:", "",
        f"| ZeRO | formula | predicted | {' | '.join(head)} | largest peak / predicted |", "|---" * (4 + ranks) + "|", *lines, "",
        "Besides the formula a rank's peak has the process itself, the copy that a checkpoint is written from (its share of weights and moments), what "
        "two\nmicro-batches save, gradients whose sums are under way and, under ZeRO 3, the layers that are whole meanwhile.", "",
    ])  # fmt: skip


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="300M")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    described, lines = machine(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_data(work)
        shapes = make_model(work, options.model, options.steps)
        for zero in options.stages:
            lines.append(row(work, shapes, options.ranks, zero))
            print(lines[-1], flush=True)
    text = report(described, shapes, options.ranks, options.steps, lines)
    print(text)
    write_report("zero-memory", text, options.out)


if __name__ == "__main__":
    main()
