"""The switch train -> rollout -> train of a whole pod: seconds of each phase, beside the plain copies and ``dd`` for the same bytes.

    python benchmarks/switch_phases.py [--hidden 768] [--layers 8] [--steps 6] [--to disk] [--weights auto]

``tandem train`` runs with the residents plan ``figure``: the optimizer and the reference leave memory for a rollout. The journal has the seconds of every
transition and the bytes of every move; the first step is left out, because it touches each page of memory for the first time. *Plain* is, for the bytes of
the same phase, a warm copy in memory (numpy, one thread), a read of warm memory or ``dd`` with fsync and ``dd`` from the cache to memory. The register copies
each weight once. An update of an engine that shares the published weights reads each once and copies none; one of an engine that copies them (``--weights
copied``) copies each once and packs it once more, to memory that is new to a process that was just started. Moves to disk write and read. Starting the engine,
rollout, passes and the optimizer's step are work and no copies; they are listed, and not part of the ratio.
"""

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from machine import ROOT, machine, write_ratios, write_report
from options import parser as shared_parser
from weights_shared import PlainRead

from tandem.config.load import build
from tandem.config.model import NewModelConfig
from tandem.config.recipe import Recipe
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes
from tandem.runtime.records.journal import Journal
from tandem.weight_transfer.sharing import can_share

TARGET = 1.3
COPIES = ("offload", "convert", "register", "update_weight", "onload")
ROUNDS = 5


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def memory_copy(size: int, *, is_new: bool = False) -> list[float]:
    """Seconds of copies of ``size`` bytes to memory that was written before, or that ``is_new`` to the process, whose pages the system clears first."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return [timed(source.copy if is_new else lambda: np.copyto(target, source)) for _ in range(ROUNDS)]


def memory_read(size: int) -> list[float]:
    """Seconds in which one thread reads ``size`` bytes that were written before."""
    read = PlainRead(size, 1)
    return [timed(read) for _ in range(ROUNDS)]


def shares(recipe: dict[str, object], model: Path) -> bool:
    """Whether the engines of a run of ``recipe`` compute with the published weights where they are."""
    built = build(Recipe, recipe)
    return built.shares_weights and can_share(read_shapes(model), built.trainer.dtype, built.rollout.weights)


def dd(folder: Path, size: int) -> tuple[list[float], list[float]]:
    """Seconds in which ``dd`` writes ``size`` bytes with fsync, and reads them."""
    path, blocks = folder / "dd.bin", max(1, size // 2**20)
    write = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={blocks}", "conv=fsync"]
    read = ["dd", f"if={path}", "of=/dev/null", "bs=1M"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    seconds = [(timed(lambda: subprocess.run(write, **quiet)), timed(lambda: subprocess.run(read, **quiet))) for _ in range(ROUNDS)]  # type: ignore[call-overload]
    path.unlink()
    return [each[0] for each in seconds], [each[1] for each in seconds]


def main() -> None:
    parser = shared_parser(__doc__ or "", work="model and run are")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--to", choices=("memory", "disk"), default="disk")
    parser.add_argument("--weights", choices=("auto", "shared", "copied"), default="auto")
    parser.add_argument("--plan", choices=("keep", "offload", "figure", "terminate"), default="figure")
    options = parser.parse_args()
    began = machine()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = work / f"model-{options.hidden}-{options.layers}"
    if not model.exists():
        shape = NewModelConfig(
            architecture="qwen3", hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 128, head_dim=64, intermediate_size=4 * options.hidden, max_position_embeddings=64,
        )  # fmt: skip
        create_model(shape, 0, model)
    name = f"switch-{int(time.time())}"
    recipe = {
        "model": {"path": str(model)}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "rollout": {"prompts_per_step": 2, "max_tokens": 8, "weights": options.weights}, "algorithm": {"group_size": 2, "kl_coef": 0.01},
        "trainer": {"learning_rate": 1e-5}, "evaluation": {"every_steps": 1000, "prompts": 2, "final_prompts": 2},
        "checkpoint": {"every_steps": 1000}, "run": {"max_steps": options.steps, "directory": str(work), "name": name},
        "residents": {"plan": options.plan, **({"to": options.to} if options.plan != "keep" else {})},
    }
    path = work / "switch.yaml"
    path.write_text(yaml.safe_dump(recipe))
    subprocess.run([sys.executable, "-m", "tandem.cli.main", "train", str(path)], cwd=ROOT, check=True, stdout=sys.stderr)
    seconds: dict[str, list[float]] = defaultdict(list)
    moved: dict[tuple[str, str], list[float]] = defaultdict(list)
    weights = 0
    with Journal(work / name / "journal.sqlite", read_only=True) as journal:
        by_step: dict[tuple[int, str], float] = defaultdict(float)
        for each in journal.transitions():
            if not 1 <= each.step < options.steps or each.ended_s is None:
                continue
            phase = each.state if each.sidecar == "trainer" or each.state not in COPIES else "update_weight of the engine"
            by_step[each.step, phase] += each.ended_s - each.started_s
            weights = int(each.detail.get("bytes", weights))
            for move in each.detail.get("moves", []):
                if move["resident"] not in ("engine_weights", "kv_cache"):
                    moved[move["move"], move["resident"]].append(float(move["bytes"]))
        for (_, phase), value in by_step.items():
            seconds[phase].append(value)
    # The engine reads the weights while the trainer waits in the same phase.
    seconds.pop("update_weight of the engine", None)
    count = options.steps - 1
    out = sum(sum(values) for (move, _), values in moved.items() if move == "offload") / count
    back = sum(sum(values) for (move, _), values in moved.items() if move == "reload") / count
    is_shared, ends = shares(recipe, model), options.plan in ("figure", "terminate")
    copy = memory_copy(weights)
    if is_shared:
        update = memory_read(weights)
    else:
        update = [2 * each for each in (memory_copy(weights, is_new=True) if ends else copy)]
    write, read = dd(work, int(out)) if options.to == "disk" and out else ([0.0], [0.0])
    plain = {"offload": write, "convert": [0.0], "register": copy, "update_weight": update, "onload": read}
    lines = [
        "# The switch of a pod, by phase", "", f"{began}", "",
        f"Qwen3 with hidden {options.hidden} and {options.layers} layers, weights of {weights / 2**20:,.0f} MiB, plan `{options.plan}` to {options.to}; "
        f"{out / 2**20:,.0f} MiB leave memory and {back / 2**20:,.0f} MiB come back in a step. Engines "
        f"{'compute with the published weights: an update reads them once' if is_shared else 'copy the weights and pack the copy'}. "
        f"Seconds, median of {count} steps.", "",
        "| phase | seconds, median (best) | plain copies, median (best) |", "|---|---|---|",
    ]  # fmt: skip
    for phase, values in sorted(seconds.items(), key=lambda item: (item[0] not in COPIES, item[0])):
        beside = f"{statistics.median(plain[phase]):.3f} ({min(plain[phase]):.3f})" if phase in plain else "work"
        lines.append(f"| {phase} | {statistics.median(values):.3f} ({min(values):.3f}) | {beside} |")
    ratios = {}
    for how, of in (("medians", statistics.median), ("best", min)):
        total, plainly = sum(of(seconds[phase]) for phase in COPIES if phase in seconds), sum(of(values) for values in plain.values())
        ratios[how] = total / max(plainly, 1e-9)
        lines += ["", f"Sum of the switch, {how}: {total:.3f} s, of the plain copies {plainly:.3f} s: ratio {ratios[how]:.2f}, at most {TARGET}."]
    print("\n".join(lines))
    write_report("switch-phases", "\n".join(lines), options.out)
    rows = [{"what": f"switch of a pod / plain copies, {how}", "ratio": ratio, "target": f"at most {TARGET}"} for how, ratio in ratios.items()]
    write_ratios("switch_phases", rows, work)


if __name__ == "__main__":
    main()
