"""One GRPO step of ours beside TRL's: 32 prompts x 8 samples, up to 32 new tokens, the same start model and prompts.

    python benchmarks/grpo_step.py [--peer-python .venv-peer/bin/python] [--steps 8] [--threads 1 2]

Both sides are processes of their own that take turns, step by step, so that both meet the same neighbours. Our step is the
whole of what a run does between two steps (prompts, rollout, judges in their own process, reference pass, update, weights
into the engine, and its metrics); TRL's is what lies between its ``on_step_begin`` and ``on_step_end``. CPU seconds are those of
all threads and child processes. The first step of each side is not counted.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import HERE, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser
from start_model import recipe_with, warm_model, write_peer_settings, write_prompts, write_run

KL = {"on": 0.01, "off": 0.0}


def measure(model: Path, work: Path, peer: str, kl: float, threads: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """The counted steps of each side, taken in turn."""
    recipe = recipe_with([f"algorithm.kl_coef={kl}", f"machine.threads={threads}"])
    with tempfile.TemporaryDirectory(dir=work) as folder:
        run = write_run(recipe, Path(folder) / "ours")
        prompts = write_prompts(recipe, model, steps + 1, Path(folder) / "prompts.jsonl")
        settings = write_peer_settings(recipe, Path(folder) / "peer", threads)
        ours = [sys.executable, HERE / "peers" / "tandem_grpo.py", model, prompts, run]
        theirs = [peer, HERE / "peers" / "trl_grpo.py", model, prompts, settings]
        with Driven("tandem", ours, threads, work / "tandem_grpo.log") as a, Driven("TRL", theirs, threads, work / "trl_grpo.log") as b:
            sides: dict[str, list[dict[str, Any]]] = {"tandem": [], "TRL": []}
            for step in range(steps + 1):
                for name, side in (("tandem", a), ("TRL", b)):
                    took = side.ask("step")
                    if step:
                        sides[name].append(took)
                    print(f"threads {threads}, KL {kl:g}, step {step}, {name}: {took}", file=sys.stderr, flush=True)
    return sides


def row(kl: str, threads: int, sides: dict[str, list[dict[str, Any]]]) -> tuple[str, dict[str, tuple[float, float]]]:
    """A row of the table, and the ratios (best, median) by kind of seconds."""
    cells, ratios = [f"{threads}", kl], {}
    for kind in ("cpu_s", "wall_s"):
        a, b = (best_and_median([step[kind] for step in sides[name]]) for name in ("tandem", "TRL"))
        ratios[kind] = (b[0] / a[0], b[1] / a[1])
        cells += [f"{a[0]:.2f} / {a[1]:.2f}", f"{b[0]:.2f} / {b[1]:.2f}", f"**{ratios[kind][0]:.2f}** / {ratios[kind][1]:.2f}"]
    lengths = [sum(step["mean_length"] for step in sides[name]) / len(sides[name]) for name in ("tandem", "TRL")]
    apart = abs(lengths[0] / lengths[1] - 1)
    cells.append(f"{lengths[0]:.2f} / {lengths[1]:.2f}" + (f" (they differ by {apart:.0%})" if apart > 0.02 else ""))
    return "| " + " | ".join(cells) + " |", ratios


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1, 2), peer=True, work="the start model is")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each side")
    parser.add_argument("--kl", nargs="+", choices=sorted(KL), default=["off", "on"])
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    model = warm_model(options.work)
    lines, promises = [], []
    for threads in options.threads:
        for kl in options.kl:
            line, ratios = row(kl, threads, measure(model, options.work, peer, KL[kl], threads, options.steps))
            lines.append(line)
            kind = "cpu_s" if threads == 1 else "wall_s"
            seconds = "CPU" if threads == 1 else "wall"
            what = f"GRPO step, {seconds} seconds, {threads} thread{'s' if threads > 1 else ''}, KL {kl}"
            promises.append({"what": what, "ratio": ratios[kind][0], "median": ratios[kind][1], "target": 2.0})
    text = "\n".join([
        "# A GRPO step beside TRL 1.16", "", machine_line(described, options.steps), "",
        "| threads | KL | CPU s tandem | CPU s TRL | TRL / tandem | wall s tandem | wall s TRL | TRL / tandem | tokens a completion, tandem / TRL |",
        "|---|---|---|---|---|---|---|---|---|", *lines, "",
    ])
    print(text)
    print(f"wrote {write_report('grpo-step', text, options.out)}")
    write_ratios("grpo_step", promises, options.work)


def machine_line(described: str, steps: int) -> str:
    return (
        f"{described}\n\nBest / median of {steps} steps a side, interleaved step by step in one run; 32 prompts x 8 samples, up to 32 new "
        "tokens, the sort recipe's warm model and hyper-parameters on both sides, the same prompts. CPU seconds count all threads "
        "and child processes. OMP_NUM_THREADS and GOMP_SPINCOUNT are the same on both sides."
    )


if __name__ == "__main__":
    main()
