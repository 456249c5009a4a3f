"""Every optimizer, precision and offload on the same pretraining run: held-out loss, bytes of the optimizer's state, seconds of a step.

    python benchmarks/training_choices.py [--steps 80] [--offload-steps 5] [--threads 1]

A Qwen3 of 1.2M parameters learns the Python standard library's own sources (sequence 128, 16 sequences a step, learning rate 2e-3,
WSD). Each row is a whole run of ``tandem train`` from the same weights on the same batches; the best of its steps counts for seconds. Precision is
emulated on a CPU, so its seconds say what emulation costs. There is no peer: the first row is what the others are to be compared with.

What offload costs is measured once more where weights are larger than buffers: a Qwen3 of 29M parameters (hidden 512, 9 layers), sequence 512, 4
sequences a step, each choice a process of its own. Resident memory is that of the process after its last step, torch and what it keeps of freed memory
included; the files are in the page cache, so that the seconds are those of copying and not of a disk.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from machine import machine, write_report
from options import parser as shared_parser

from tandem.config.load import build, to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize
from tandem.data.tokenizing.train_tokenizer import train_tokenizer
from tandem.jobs.start import train
from tandem.model.huggingface.safetensors_file import read_file
from tandem.storage.files import open_storage

PAGED = {"offload": "nvme", "offload_parameters": "nvme"}
CHOICES: dict[str, dict[str, str]] = {
    "adamw, fp32": {},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "muon": {"optimizer": "muon"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "offload nvme": {"offload": "nvme"},
    "offload_parameters nvme": PAGED,
    "offload_activations nvme": {"offload_activations": "nvme"},
}
OFFLOADS: dict[str, dict[str, str]] = {
    "none": {},
    "offload": {"offload": "nvme"},
    "offload, offload_parameters": PAGED,
    "offload_activations": {"offload_activations": "nvme"},
    "all three, recompute full": {**PAGED, "offload_activations": "nvme", "recompute": "full"},
}
LARGE = {
    "hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536, "max_position_embeddings": 512
}
TRAIN = "import sys; from tandem.cli.main import main; sys.exit(main(sys.argv[1:]))"


def prepare(folder: Path) -> None:
    """Two datasets of some packages of the standard library."""
    library, form = Path(json.__file__).parent.parent, DocumentFormat(suffixes=(".py",))
    (folder / "text").mkdir()
    for package in ("json", "email", "http", "logging", "asyncio", "unittest", "xml"):
        for path in sorted((library / package).rglob("*.py")):
            (folder / "text" / f"{package}-{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    train_tokenizer(open_storage(str(folder / "text")), form, 1024, folder / "tokenizer")
    for side in ("train", "held_out"):
        settings = TokenizeSettings(str(folder / "text"), str(folder / side), str(folder / "tokenizer"), form, side=side, held_out_share=0.1, workers=1)  # type: ignore[arg-type]
        tokenize(settings)


def recipe(folder: Path, name: str, chosen: dict[str, Any], steps: int, threads: int) -> PretrainRecipe:
    sections: dict[str, Any] = {
        "algorithm": {"name": "pretrain"},
        "model": {
            "create": {
                "architecture": "qwen3", "tokenizer": str(folder / "tokenizer"), "hidden_size": 128, "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "max_position_embeddings": 128,
                "initializer_range": 0.04,
            }
        },
        "data": {"train": [{"path": str(folder / "train")}], "held_out": str(folder / "held_out"), "sequence_length": 128, "global_batch_size": 16},
        "trainer": {
            "learning_rate": 2e-3, "warmup_steps": 10, "schedule": "wsd", "decay_steps": steps // 4, "weight_decay": 0.1,
            "beta2": 0.95, **chosen,
        },
        "evaluation": {"every_steps": steps, "sequences": 64},
        "checkpoint": {"every_steps": steps, "keep": 1},
        "run": {"max_steps": steps, "directory": str(folder), "name": name.replace(", ", "-").replace(" ", "-")},
        "machine": {"threads": threads},
    }  # fmt: skip
    return build(PretrainRecipe, sections)


def offload_rows(folder: Path, steps: int, threads: int) -> list[str]:
    """The second table, a row a choice."""
    lines, first = [], None
    for name, chosen in OFFLOADS.items():
        sections = to_mapping(recipe(folder, "large", {**chosen, "schedule": "constant", "decay_steps": 0}, steps, threads))
        sections["model"]["create"] |= LARGE
        sections["data"] |= {"sequence_length": 512, "global_batch_size": 4, "held_out": ""}
        sections["evaluation"] = {}
        file, directory = folder / "large.yaml", folder / "large"
        file.write_text(yaml.safe_dump(sections), encoding="utf-8")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", TRAIN, "train", str(file)], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        # The first step allocates.
        seconds, resident = min(row["timing_s/train"] for row in rows[1:]), rows[-1]["memory/train/measured"]
        first = first or (seconds, rows[-1]["train/loss"], worked)
        bits = "the same" if rows[-1]["train/loss"] == first[1] else "**other**"
        lines.append(f"| {name} | {seconds:.2f} s | {seconds / first[0]:.2f} | {worked / first[2]:.2f} | {resident / 2**20:,.0f} MiB | {bits} |")
        print(lines[-1], file=sys.stderr, flush=True)
        shutil.rmtree(directory)
    return lines


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--offload-steps", type=int, default=5)
    options = parser.parse_args()
    described, lines = machine(), []
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for name, chosen in CHOICES.items():
            result = train(recipe(folder, name, chosen, options.steps, options.threads))
            saved = result.directory / "checkpoints" / f"step-{options.steps}" / "rank-00000.safetensors"
            moments = sum(tensor.nbytes for name, tensor in read_file(saved) if not name.startswith("weights/"))
            rows = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            seconds = min(row["timing_s/train"] for row in rows)
            lines.append(f"| {name} | {result.figures['loss'].after:.4f} | {moments / 2**20:.2f} MiB | {1000 * seconds:.0f} ms |")
            print(lines[-1], file=sys.stderr, flush=True)
        offloaded = offload_rows(folder, options.offload_steps, options.threads)
    text = "\n".join([
        "# Optimizers, precision and offload on one run", "", described, "", *(__doc__ or "").split("\n\n")[2:3], "",
        f"After {options.steps} steps, {options.threads} thread{'s' if options.threads > 1 else ''}:", "",
        "| choice | held-out loss, nats a token | state in the checkpoint | step, best |", "|---|---|---|---|", *lines, "",
        *(__doc__ or "").split("\n\n")[3:],
        "| nvme | step, best | to none | CPU seconds of the run, to none | resident | loss of the last step |", "|---|---|---|---|---|---|", *offloaded, "",
    ])
    print(text)
    print(f"wrote {write_report('training-choices', text, options.out)}")


if __name__ == "__main__":
    main()
