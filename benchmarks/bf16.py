"""bf16 on a CPU with dot products of bf16 pairs: our engine beside vLLM in bf16 and our own in fp32, and a training step beside Hugging Face's
``Trainer`` in bf16 and our own in fp32.

    python benchmarks/bf16.py [--sections engine training] [--models 84M 0.5B] [--vllm-python .venv-vllm/bin/python]
                              [--peer-python .venv-peer/bin/python] [--rounds 3] [--new 64] [--threads 1]

The engine computes 64 sequences of 32 prompt tokens and ``--new`` drawn ones at temperature 1, ours in bf16 with a KV cache in bf16, as vLLM's is. The
training step is that of ``training.py``, "packed": 8 sequences of 512 tokens, a Qwen3 of 30M parameters, AdamW. Sides take turns, call by call, each in a
process of its own; what counts are CPU seconds of the process, the best and the median of the rounds. "Share" is of the rate of the instruction itself
(``vdpbf16ps``; for fp32 a fused multiply-add) in a loop over registers on one thread, measured before and after the part, the higher one.
"""

import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bounds import with_bound
from engine_models import flops
from engine_parts import Sides
from machine import HERE, Driven, machine, peer_python, write_ratios, write_report
from options import parser
from training import LENGTH, SEQUENCES, model_folder, operations, write_batches

SEQUENCES_AT_ONCE, PROMPT = 64, 32
TARGETS = {"vLLM bf16": 1.3, "tandem fp32": 1.7, "training fp32": 1.4, "Trainer bf16": 1.5}
SETTINGS: dict[str, dict[str, Any]] = {"tandem fp32": {}, "tandem bf16": {"precision": "bf16", "kv_cache_dtype": "bfloat16"}}


def rates(work: Path) -> dict[str, float]:
    """GFLOP/s of each instruction on one thread; empty without a compiler or the instructions."""
    program = work / "dot_rate"
    compiler = shutil.which("g++")
    if compiler is None:
        return {}
    built = subprocess.run([compiler, "-O2", "-march=native", str(HERE / "peers" / "dot_rate.cpp"), "-o", str(program)], check=False)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False) if built.returncode == 0 else None
    return dict(zip(("fp32", "bf16"), map(float, done.stdout.split()), strict=False)) if done is not None and done.returncode == 0 else {}


def faster(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {name: max(first[name], second[name]) for name in first}


def engine(sides: Sides, model: str, threads: int, new: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each call by side."""
    took: dict[str, list[float]] = {}
    running = {name: sides.tandem(model, threads, name) for name in SETTINGS}
    try:
        if "vLLM" in sides.pythons:
            running["vLLM bf16"] = sides.vllm(model, threads, dtype="bfloat16")
        for side in running.values():
            side.ask(f"generate 1 {SEQUENCES_AT_ONCE} {PROMPT} 2 1.0")
        for call in range(2, rounds + 2):
            for name, side in running.items():
                answer = side.ask(f"generate {call} {SEQUENCES_AT_ONCE} {PROMPT} {new} 1.0")
                assert answer["tokens"] == SEQUENCES_AT_ONCE * new, (name, answer)
                took.setdefault(name, []).append(answer["cpu_s"])
                print(f"{model}, {name}: {answer['cpu_s']:.2f} CPU s, {answer['wall_s']:.2f} s", file=sys.stderr, flush=True)
    finally:
        for side in running.values():
            side.close()
    return took


def training(work: Path, peer: str | None, threads: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each step by side."""
    model, batches = model_folder(work), work / "training-batches.json"
    write_batches(batches, rounds + 1)
    ours = [sys.executable, HERE / "peers" / "tandem_training.py", model, batches, str(threads)]
    commands: dict[str, list[Any]] = {"tandem fp32": [*ours, "fp32"], "tandem bf16": [*ours, "bf16"]}
    if peer is not None:
        commands["Trainer bf16"] = [peer, HERE / "peers" / "transformers_training.py", model, batches, str(threads), "trainer", "bf16"]
    running = {name: Driven(name, command, threads, work / f"{name.replace(' ', '-')}.log") for name, command in commands.items()}
    took: dict[str, list[float]] = {name: [] for name in running}
    try:
        for step in range(rounds + 1):
            for name, side in running.items():
                answer = side.ask("packed")
                print(f"step {step}, {name}: {answer}", file=sys.stderr, flush=True)
                if step:
                    took[name].append(answer["cpu_s"])
    finally:
        for side in running.values():
            side.close()
    return took


def rows(what: str, took: dict[str, list[float]], work: float, rate: dict[str, float], promises: list[dict[str, Any]]) -> list[str]:
    """The rows of a part; appends to ``promises``."""
    own, lines = took["tandem bf16"], []
    for name, seconds in took.items():
        best, median = min(seconds), statistics.median(seconds)
        bound = rate.get(name.split()[-1])
        share = f"{work / best / 1e9 / bound:.0%} of {bound:.0f}" if bound else ""
        ratio = "" if name == "tandem bf16" else f"**{best / min(own):.2f}** / {median / statistics.median(own):.2f}"
        lines.append(f"| {what} | {name} | {best:.2f} / {median:.2f} | {work / best / 1e9:.0f} | {share} | {ratio} |")
        target = TARGETS.get("training fp32" if what == "training" and name == "tandem fp32" else name)
        if ratio and target:
            promises.append({"what": f"bf16, {what}, against {name}", "ratio": best / min(own), "median": median / statistics.median(own), "target": target})
            # If ours were nothing but its products, at the rate of the dot product's instruction.
            promises[-1]["bound"] = best * rate["bf16"] * 1e9 / work if "bf16" in rate else None
    return lines


def verdict(promise: dict[str, Any]) -> str:
    """Whether a target is met. Without the dot product's instruction its sums are emulated, for equal bits, and their speed says nothing."""
    if promise["bound"] is None:
        return "not measurable here"
    return "met" if promise["ratio"] >= promise["target"] else "**missed**"


def main() -> None:
    made = parser(__doc__ or "", threads=1, peer=True, work="models and logs are")
    made.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    made.add_argument("--without", nargs="+", choices=("vLLM", "Trainer"), default=[], help="peers that are left out on purpose")
    made.add_argument("--sections", nargs="+", choices=("engine", "training"), default=["engine", "training"])
    made.add_argument("--models", nargs="+", default=["84M", "0.5B"])
    made.add_argument("--rounds", type=int, default=3, help="counted rounds of each side")
    made.add_argument("--new", type=int, default=64, help="new tokens of a sequence")
    options = made.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    described = machine()
    pythons = {} if "vLLM" in options.without else {"vLLM": peer_python(options.vllm_python, "--vllm-python", "`python benchmarks/peers/setup.py vllm`")}
    peer = None if "Trainer" in options.without or "training" not in options.sections else peer_python(options.peer_python)
    lines: list[str] = []
    promises: list[dict[str, Any]] = []
    rate = rates(options.work)
    for model in options.models if "engine" in options.sections else ():
        took = engine(Sides(options.work, pythons, {"enforce_eager": True}, SETTINGS), model, options.threads, options.new, options.rounds)
        rate = faster(rate, rates(options.work))
        lines += rows(model, took, flops(model, SEQUENCES_AT_ONCE, PROMPT, options.new), rate, promises)
    if "training" in options.sections:
        took = training(options.work, peer, options.threads, options.rounds)
        rate = faster(rate, rates(options.work))
        lines += rows("training", took, operations([LENGTH] * SEQUENCES), rate, promises)
    verdicts = [f"| {p['what']} | {p['ratio']:.2f} ({p['median']:.2f}) | {with_bound(p)} | {p['target']} | {verdict(p)} |" for p in promises]
    text = "\n".join([
        "# bf16 on a CPU", "", described, "", *(__doc__ or "").split("\n\n")[2:],
        f"{options.threads} thread(s), {options.new} new tokens, {options.rounds} rounds; vLLM eager, in one process."
        + "".join(f" Left out: {name}." for name in options.without), "",
        "| what | side | CPU seconds, best / median | GFLOP/s | share of the instruction's rate | side / tandem bf16, best / median |",
        "|---|---|---|---|---|---|",
        *lines, "", "| ratio | best (median) | bound | share of it | target | |", "|---|---|---|---|---|---|", *verdicts, "",
    ])  # fmt: skip
    print(text)
    print(f"wrote {write_report('bf16', text, options.out)}")
    write_ratios("bf16", promises, options.work)


if __name__ == "__main__":
    main()
