"""One pretraining step of ours beside transformers: a plain PyTorch loop and Hugging Face's ``Trainer``, on the same packed data; and
sequences of varied length beside a padded batch.

    python benchmarks/training.py [--peer-python .venv-peer/bin/python] [--rounds 6] [--threads 1 2]

A Qwen3 of 30M parameters, fp32, AdamW (fused on every side), clipping at 1. "Packed": 8 sequences of 512 tokens. "Varied": 16 sequences
of log-normal lengths (mean 180, sigma 0.8, cut at 1,024), which the plain loop pads to the longest and we lay end to end. The sides are
processes of their own that take turns, step by step, from the same weights on the same tokens; their losses are compared. Rates are tokens that
are trained on a second, padding not counted. "Share" is of the rate that torch's own matrix product of 2,048 x 2,048 x 2,048 reaches on the same
threads, with 6 operations a matrix parameter and token and the causal half of attention counted. The first step of each kind is not counted.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from machine import HERE, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser

from tandem.kernels import select
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise

SHAPES = ModelShapes("qwen3", 8192, 512, 8, 8, 4, 64, 1536, 1024, tie_word_embeddings=True, qk_norm=True)
LENGTH, SEQUENCES, VARIED = 512, 8, 16
TARGETS = {("packed", "Trainer"): 1.25, ("packed", "plain loop"): 1.15, ("varied", "plain loop"): 1.8}


def model_folder(work: Path) -> Path:
    folder = work / "training-30M"
    if not folder.exists():
        decoder = Decoder(SHAPES, select("reference"))
        initialise(decoder, seed=0, standard_deviation=0.02)
        save_model(decoder, folder)
    return folder


def write_batches(path: Path, steps: int) -> None:
    """``{kind: [steps of [sequences of ids]]}``."""
    draw = random.Random(0)

    def ids(length: int) -> list[int]:
        return [draw.randrange(SHAPES.vocab_size) for _ in range(length)]

    def varied() -> int:
        return max(2, min(1024, round(draw.lognormvariate(math.log(180) - 0.8**2 / 2, 0.8))))

    batches = {
        "packed": [[ids(LENGTH) for _ in range(SEQUENCES)] for _ in range(steps)],
        "varied": [[ids(varied()) for _ in range(VARIED)] for _ in range(steps)],
    }
    path.write_text(json.dumps(batches), encoding="utf-8")


def operations(lengths: list[int]) -> float:
    """Floating-point operations of one step's matrix products and attention, forward and backward."""
    matrices = sum(shape[0] * shape[1] for _, shape in parameters(SHAPES) if len(shape) == 2)
    attention = 6 * SHAPES.num_hidden_layers * SHAPES.query_size
    return float(sum(6 * matrices * length + attention * length * length for length in lengths))


def measure(model: Path, work: Path, peer: str, threads: int, rounds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The counted steps by kind and side, taken in turn; ``rates``: operations a second of a large matrix product."""
    batches = work / "training-batches.json"
    write_batches(batches, rounds + 1)
    ours = [sys.executable, HERE / "peers" / "tandem_training.py", model, batches, str(threads)]
    theirs = [peer, HERE / "peers" / "transformers_training.py", model, batches, str(threads)]
    kinds = {"packed": ("tandem", "plain loop", "Trainer"), "varied": ("tandem", "plain loop")}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {kind: {name: [] for name in names} for kind, names in kinds.items()}
    found["rate"] = {"rate": []}
    with (
        Driven("tandem", ours, threads, work / "tandem_training.log") as first,
        Driven("plain loop", [*theirs, "loop"], threads, work / "loop_training.log") as second,
        Driven("Trainer", [*theirs, "trainer"], threads, work / "trainer_training.log") as third,
    ):
        sides = {"tandem": first, "plain loop": second, "Trainer": third}
        for step in range(rounds + 1):
            found["rate"]["rate"].append(first.ask("rate"))
            for kind, names in kinds.items():
                for name in names:
                    took = sides[name].ask(kind)
                    print(f"threads {threads}, step {step}, {kind}, {name}: {took}", file=sys.stderr, flush=True)
                    if step:
                        found[kind][name].append(took)
    return found


def lengths_of(work: Path, kind: str) -> list[list[int]]:
    batches = json.loads((work / "training-batches.json").read_text(encoding="utf-8"))
    return [[len(sequence) for sequence in step] for step in batches[kind][1:]]


def per_token(kind: str, name: str, took: list[dict[str, Any]], lengths: list[list[int]]) -> tuple[float, float]:
    """The best and the median seconds a trained token."""
    return best_and_median([step[name] / sum(ids) for step, ids in zip(took, lengths, strict=True)])


def table(threads: int, found: dict[str, dict[str, list[dict[str, Any]]]], work: Path, promises: list[dict[str, Any]]) -> list[str]:
    """The rows of one thread count; appends to ``promises``."""
    rate = max(step["operations_per_s"] for step in found["rate"]["rate"])
    lines = []
    for kind in ("packed", "varied"):
        lengths = lengths_of(work, kind)
        ops = sum(operations(ids) for ids in lengths) / sum(map(sum, lengths))
        own = {clock: per_token(kind, clock, found[kind]["tandem"], lengths) for clock in ("wall_s", "cpu_s")}
        for name, took in found[kind].items():
            wall, cpu = (per_token(kind, clock, took, lengths) for clock in ("wall_s", "cpu_s"))
            ratios = {"wall": [b / a for a, b in zip(own["wall_s"], wall, strict=True)], "CPU": [b / a for a, b in zip(own["cpu_s"], cpu, strict=True)]}
            apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(took, found[kind]["tandem"], strict=True))
            shown = ["", "", ""] if name == "tandem" else [*(f"**{r[0]:.2f}** / {r[1]:.2f}" for r in ratios.values()), f"{apart:.1e}"]
            rates = [f"{1 / wall[0]:,.0f} / {1 / wall[1]:,.0f}", f"{1 / cpu[0]:,.0f} / {1 / cpu[1]:,.0f}", f"{ops / wall[0] / rate:.0%}"]
            lines.append("| " + " | ".join([str(threads), kind, name, *rates, *shown]) + " |")
            if name != "tandem":
                clock = "CPU" if threads == 1 else "wall"
                what = f"training, {kind}, against {name}, {clock} seconds, {threads} thread{'s' if threads > 1 else ''}"
                promises.append({"what": what, "ratio": ratios[clock][0], "median": ratios[clock][1], "target": TARGETS[kind, name]})
    return [*lines, f"| {threads} | | 2,048^3 product | {rate / 1e9:,.0f} GFLOP/s | | | | | |"]


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1, 2), peer=True, work="the start model is")
    parser.add_argument("--rounds", type=int, default=6, help="counted steps of each side and kind")
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    model = model_folder(options.work)
    lines: list[str] = []
    promises: list[dict[str, Any]] = []
    for threads in options.threads:
        lines += table(threads, measure(model, options.work, peer, threads, options.rounds), options.work, promises)
    text = "\n".join([
        "# A training step beside transformers", "", described, "", *(__doc__ or "").split("\n\n")[2:], "",
        "| threads | data | side | tokens a wall s, best / median | tokens a CPU s | share | peer / ours, wall | peer / ours, CPU | losses apart |",
        "|---|---|---|---|---|---|---|---|---|", *lines, "",
    ])
    print(text)
    print(f"wrote {write_report('training', text, options.out)}")
    write_ratios("training", promises, options.work)


if __name__ == "__main__":
    main()
