"""A GRPO step of the command beside that of another checkout: CPU seconds at one thread, by phase and by process, and whether rewards are the same.

The sort recipe with KL, as in ``grpo_step.py``. Both are runs of the command with every process of their pods, and take turns, step by step; each has the
interpreter ``.venv/bin/python`` of its own checkout, because the processes of a pod import what is installed there. The first step is not counted.

    python benchmarks/grpo_step_before.py --before CHECKOUT [--steps 12] [--share-prompts]
"""

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_step import PHASES, run_recipe, start_of
from machine import HERE, Driven, best_and_median, machine, write_report
from options import parser as shared_parser
from peers.clock import cpu_of, family
from start_model import write_run

PROCESSES = {"tandem_run": "controller", "--role trainer": "trainer's shim", "--role rollout": "rollout's shim", "rewards.worker": "rewards"}
"""What the command line of a process has, and its name; the workers of a pod are forked from one process and are told apart by their order."""


def processes_of(side: Driven) -> dict[int, str]:
    """The processes of a run by their ids: those of the pod's workers have the trainer first."""
    named, forked = dict[int, str](), ["trainer's worker", "rollout's worker"]
    for pid in sorted(family(side.process.pid)):
        command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
        known = next((name for part, name in PROCESSES.items() if part in command), None)
        if known is not None or "trainer.rank_process" in command:
            named[pid] = known or (forked.pop(0) if forked else "worker")
    return named


def take_turns(trees: Mapping[str, Path], work: Path, steps: int, *, share_prompts: bool) -> dict[str, tuple[list[dict[str, Any]], dict[str, float]]]:
    """By side: its counted steps, and the CPU seconds of each of its processes in all of them."""
    model = start_of("sort", work).resolve()
    with tempfile.TemporaryDirectory(dir=work) as name, ExitStack() as stack:
        sides = {}
        for side, tree in trees.items():
            own = Path(name).resolve() / side
            recipe = run_recipe(["algorithm.kl_coef=0.01", "machine.threads=1"], model, own / "runs", steps + 3, share_prompts=share_prompts)
            command = [tree / ".venv/bin/python", tree / "benchmarks/peers/tandem_run.py", write_run(recipe, own)]
            sides[side] = stack.enter_context(Driven(side, command, 1, work / f"grpo-step-before-{side}.log", {"PYTHONPATH": str(tree)}))
        taken: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        began = dict[str, dict[int, float]]()
        for number in range(steps + 1):
            if number == 1:
                began = {side: {pid: cpu_of([pid]) for pid in processes_of(driven)} for side, driven in sides.items()}
            for side, driven in sides.items():
                took = driven.ask("step")
                taken[side] += [took] if number else []
        by_process = {side: {processes_of(sides[side])[pid]: cpu_of([pid]) - before for pid, before in began[side].items()} for side in sides}
    return {side: (taken[side], by_process[side]) for side in sides}


def main() -> None:
    made = shared_parser(__doc__ or "", work="the start model is")
    made.add_argument("--before", type=Path, required=True, help="the checkout of another commit, with its own .venv")
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--share-prompts", action="store_true")
    options = made.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    work, out, described, before = options.work.resolve(), options.out.resolve(), machine(), options.before.resolve()
    # ``python -m`` begins its search in the current folder, which would be the code of one side for both.
    os.chdir(work)
    measured = take_turns({"before": before, "after": HERE.parent}, work, options.steps, share_prompts=options.share_prompts)
    (old, old_processes), (new, new_processes) = measured["before"], measured["after"]
    lines = ["# A GRPO step before and after", "", described, "", f"Sort with KL, share_prompts {options.share_prompts}, {options.steps} steps in turn.", ""]
    lines += ["| CPU ms, best / median | before | after | before / after |", "|---|---|---|---|"]
    for what in ("step", *PHASES):
        pairs = [best_and_median([1e3 * (each["cpu_s"] if what == "step" else each["phase_cpu_s"].get(what, 0.0)) for each in took]) for took in (old, new)]
        ratios = " / ".join(f"{a / max(b, 1e-9):.2f}" for a, b in zip(*pairs, strict=True))
        lines.append(f"| {what} | {' | '.join(f'{best:.1f} / {median:.1f}' for best, median in pairs)} | {ratios} |")
    lines += ["", "| process, CPU ms a step | before | after | before / after |", "|---|---|---|---|"]
    for name, seconds in old_processes.items():
        a, b = (1e3 * each / options.steps for each in (seconds, new_processes.get(name, 0.0)))
        lines.append(f"| {name} | {a:.1f} | {b:.1f} | {a / max(b, 1e-9):.2f} |")
    same = [step["reward"] for step in old] == [step["reward"] for step in new]
    lines += ["", f"The rewards of all steps are {'the same' if same else 'NOT the same'}."]
    text = "\n".join(lines)
    print(text)
    print(f"wrote {write_report('grpo-step-before', text, out)}")


if __name__ == "__main__":
    main()
