"""Makes random faults in runs of four pods on machines of their own (network namespaces, real etcd), and writes what became of each run.

    python benchmarks/pod_faults.py [--faults 100] [--first-seed 1] [--work runs/bench]

A run trains with five faults of different kinds: a kill of any process or of a whole machine, a cut between any two, full shared memory, a full disk, clocks
that jump, a slow peer, a stopped process. The runs are set up in turn with one trainer; with the trainer's ranks in two pods; in bf16 with element-wise
deltas that pods send on to each other; with two engines in each pod that compute with the published weights. Pods that end are started again, as a cluster's
manager does, and a run that ends is resumed. It is then compared with the undisturbed run in one pod: every byte of the model and of the checkpoints, the rows
of metrics.jsonl but for times, the evaluations, and every sample of every step, once each. These are the faults of tests/pod/random_faults.py. ``--work``
keeps each run (``pod-faults.jsonl``) and the folders of those with something wrong, so that the command can be stopped and started again; the report has all
that are there. Needs root. Ends with exit code 1 where something was wrong.
"""

import json
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser

for room in (".", "pod"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from four_pods import STEPS, undisturbed_run  # noqa: E402 - found by the lines above
from network import why_not  # noqa: E402
from pod_runs import PodRun  # noqa: E402
from random_faults import EACH, KINDS, SETUPS, FaultyRun, PodFault, Setup, faulty_run, rows_of  # noqa: E402


def read(path: Path) -> dict[int, FaultyRun]:
    """Returns the recorded runs by seed."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {
        row["seed"]: FaultyRun(**{**row, "wrong": tuple(row["wrong"]), "faults": tuple(PodFault(**fault) for fault in row["faults"])}) for row in rows
    }


def report(runs: dict[int, FaultyRun]) -> str:
    every = [runs[seed] for seed in sorted(runs)]
    faults = [fault for run in every for fault in run.faults]
    fine = sum(not run.wrong for run in every)
    lines = ["# Random faults in runs of four pods", "", machine(), ""]
    lines += [
        f"{len(faults)} faults in {len(every)} runs of {STEPS} steps; {fine} runs with nothing wrong: each ended, every sample was counted once, and weights, "
        "checkpoints, metrics and evaluations are those of the undisturbed run bit for bit.", "",
    ]  # fmt: skip
    recoveries = sum((Counter(run.recoveries) for run in every), Counter[str]())
    lines += [f"Replaced or left out meanwhile: {', '.join(f'{part} {count}' for part, count in sorted(recoveries.items()))}.", ""]
    lines += ["| runs with | runs | faults | nothing wrong |", "|---|---|---|---|"]
    for setup in SETUPS:
        of_setup = [run for run in every if run.setup == setup.name]
        lines.append(f"| {setup.name} | {len(of_setup)} | {sum(len(run.faults) for run in of_setup)} | {sum(not run.wrong for run in of_setup)} |")
    lines.append("")
    kinds, went_on = Counter(fault.kind for fault in faults), Counter(fault.kind for fault in faults if not fault.ended)
    lines += ["| fault | how often | the run went on by itself | s to the next step: median | longest |", "|---|---|---|---|---|"]
    lines += [f"| {kind} | {kinds[kind]} | {went_on[kind]} | {_recovery(faults, kind)} |" for kind in KINDS]
    ends = (
        "Where the command had ended, the run was resumed. Seconds to the next step count from the beginning of a fault, which itself lasts 1 to 9 s (kills: "
        "an instant), and hold the step itself and what was repeated."
    )
    return "\n".join([*lines, "", ends, "", *rows_of(every), ""])


def _recovery(faults: Sequence[PodFault], kind: str) -> str:
    """Returns the two cells of ``kind``; empty ones for records without seconds."""
    seconds = [fault.recovered_s for fault in faults if fault.kind == kind and fault.recovered_s is not None]
    return f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else " | "


def _undisturbed(folder: Path, setup: Setup) -> PodRun:
    """Returns the undisturbed run of ``setup``, which is made once."""
    run = PodRun(folder, name="run")
    if not (run.directory / "model").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        run = undisturbed_run(folder, STEPS, *setup.settings)
    return run


def main() -> int:
    parser = shared_parser(__doc__ or "", work="the runs are")
    parser.add_argument("--faults", type=int, default=100, help="in all")
    parser.add_argument("--first-seed", type=int, default=1)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    work = options.work.resolve() / "pod-faults"
    work.mkdir(parents=True, exist_ok=True)
    path = work / "pod-faults.jsonl"
    for seed in range(options.first_seed, options.first_seed + -(-options.faults // EACH)):
        if seed in read(path):
            continue
        # What the command that was stopped has left.
        shutil.rmtree(work / f"seed-{seed}", ignore_errors=True)
        setup = SETUPS[seed % len(SETUPS)]
        run = faulty_run(_undisturbed(work / f"undisturbed-{seed % len(SETUPS)}", setup), work / f"seed-{seed}", seed, setup=setup)
        print(run, flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
    runs = read(path)
    print(f"wrote {write_report('pod-faults', report(runs), options.out)}")
    return 1 if any(run.wrong for run in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
