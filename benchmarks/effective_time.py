"""The share of the time in which a run on 16,384 GPUs trains, simulated for a week with published failure rates, and where it falls below 95 %.

    python benchmarks/effective_time.py [--weeks 20]

The simulator is ``tandem.estimate.effective_time``: it asks the backoff, the learned deadline and the trigger of checkpoints that runs ask, with a clock of its
own. Each number is the mean of so many weeks with other failures. What is published and what is measured here is said in the report.
"""

import csv
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from machine import machine, write_report
from options import parser

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.watchdog import WatchdogConfig
from tandem.estimate.effective_time import EffectiveTime, Recovery, SimulatedRun, Tier, best_interval_s, effective_time
from tandem.estimate.failures import DAY_S, LLAMA3, LLAMA3_GPUS
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.trainer.checkpoint.trigger import CheckpointTrigger

WEEK_S, TARGET = 7 * DAY_S, 0.95
STEP_S = 10.0
"""Seconds of a step: Llama 3 405B has 6 x 405e9 x 16e6 operations in one of 16 million tokens, at 400 TFLOP/s a GPU (table 4: 380 to 430)."""
CHECKPOINT_BYTES, STORAGE_BYTES_S = 405e9 * 14, 2e12
"""Weights in bf16 and three numbers of fp32 a parameter; the storage of Llama 3 sustains 2 TB/s (section 3.3.1)."""
WRITE_S = CHECKPOINT_BYTES / STORAGE_BYTES_S
PUBLISHED = Recovery({"process": 600.0, "node": 600.0}, start_s=300.0, swap_s=0.0, repair_s=DAY_S, watchdog=WatchdogConfig(min_deadline_s=600.0))
"""MegaScale (arXiv 2402.15627, section 6.3): detection and diagnosis take less than 10 minutes on average, and training catches up within 15 minutes; both as
upper bounds, of which the second is 5 minutes beside the steps that are repeated."""


GPUS = (4096, 16384, 32768, 65536, 131072)


def every(minutes: float) -> Callable[[Callable[[], float]], CheckpointTrigger]:
    steps = max(1, round(60 * minutes / STEP_S))
    return lambda clock: CheckpointTrigger(CheckpointConfig(every_steps=steps), SignalRequests(lambda text: None), clock=clock)


def disk(minutes: float, stall_s: float = 2.0) -> Tier:
    return Tier("storage", every(minutes), stall_s, WRITE_S + stall_s, WRITE_S)


def ours(seconds: dict[str, float], start_s: float) -> Recovery:
    """A recovery with what was measured (``recovery-time``), and ``start_s`` for processes on a large machine."""
    return Recovery({"process": seconds["rank"], "node": seconds["node"]}, start_s, swap_s=0.0, repair_s=DAY_S)


def mean(run: SimulatedRun, weeks: int) -> tuple[float, float, list[EffectiveTime]]:
    """The mean share, the smallest of a week, and all weeks."""
    results = [effective_time(run, WEEK_S, seed) for seed in range(weeks)]
    shares = [result.share for result in results]
    return statistics.mean(shares), min(shares), results


def percent(share: float) -> str:
    return f"{100 * share:.1f} %{'' if share >= TARGET else ' (below)'}"


def recovery_table(column: str) -> dict[str, float]:
    """Seconds by fault, which recovery_time.py has measured; empty where its table is not there."""
    found = sorted((Path(__file__).parent / "results").glob("recovery-time-*.csv"))
    if not found:
        return {}
    with found[-1].open() as table:
        return {row["fault"]: float(row[column]) for row in csv.DictReader(table)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--weeks", type=int, default=20)
    chosen = options.parse_args()
    text, weeks = machine(), chosen.weeks
    # Without a table: what the code waits at most.
    detect = {"rank": 1.0, "node": 20.0} | recovery_table("detection_s")
    # A restart on many GPUs: NCCL's groups and the first collective, which this machine cannot measure.
    base = SimulatedRun(LLAMA3_GPUS, STEP_S, 32, LLAMA3, ours(detect, 120.0), [disk(5)])
    memory = Tier("memory of another node", every(1), 0.3, 1.0, 2.0)
    rows = {
        "published recovery (MegaScale's upper bounds), checkpoints each 30 minutes": replace(base, recovery=PUBLISHED, tiers=[disk(30)]),
        "published recovery, checkpoints each 5 minutes": replace(base, recovery=PUBLISHED, tiers=[disk(5)]),
        "Tandem's detection, start in 120 s, checkpoints each 30 minutes": replace(base, tiers=[disk(30)]),
        "the same, each 5 minutes": base,
        "the same, each 30 minutes, and a copy in the memory of another node each minute": replace(base, tiers=[memory, disk(30)]),
    }  # fmt: skip
    if whole := recovery_table("next_step_s"):
        seconds = " and ".join(f"{took:.1f} s for a {fault}" for fault, took in whole.items())
        name = f"the whole recovery as measured on the small machine ({seconds}), checkpoints each 5 minutes"
        rows[name] = replace(base, recovery=ours({**detect, **whole}, 0.0))
    measured = [(name, *mean(run, weeks)) for name, run in rows.items()]
    table = "\n".join(f"| {name} | {percent(share)} | {percent(least)} |" for name, share, least, _ in measured)
    breakdown = measured[3][3]
    lost = {what: statistics.mean(result.lost_s[what] / result.seconds for result in breakdown) for what in breakdown[0].lost_s}
    causes = {name for result in breakdown for name in result.by_cause}
    by_cause = sorted(((statistics.mean(r.by_cause.get(name, 0.0) / r.seconds for r in breakdown), name) for name in causes), reverse=True)
    between_s = LLAMA3.between_failures_s(LLAMA3_GPUS)
    assumed = (
        f"Mean of {weeks} weeks; a step takes {STEP_S:g} s, a checkpoint of {CHECKPOINT_BYTES / 1e12:.1f} TB stalls training for 2 s and is written in "
        f"{WRITE_S:.1f} s more. Failures: {LLAMA3.source}, one in {between_s / 3600:.2f} hours; Llama 3 reports more than 90 %. A death is found here within "
        f"{detect['rank']:.1f} s for a process and {detect['node']:.1f} s for a node; a hang after `watchdog.min_deadline_s`, 60 s. How long processes take to "
        "start on so many GPUs cannot be measured here: 120 s is an assumption, which the sweep varies. 32 spare nodes; a node is repaired in a day."
    )
    parts = [
        "# Effective training time of a simulated week on 16,384 GPUs", text, assumed,
        f"| run | effective training time | worst week |\n| --- | --- | --- |\n{table}",
        "## What takes the time",
        f"Of the fourth row: {'; '.join(f'{what} {100 * share:.2f} %' for what, share in lost.items() if share)}. By cause: "
        f"{'; '.join(f'{name} {100 * share:.2f} %' for share, name in by_cause[:8])}.",
        "## Sweep",
        f"Each row changes one thing of the fourth row above. Young's best interval for it is {best_interval_s(between_s, 2.0) / 60:.1f} minutes.",
        sweep(base, weeks),
    ]  # fmt: skip
    report = "\n\n".join(parts)
    print(report)
    write_report("effective-time", report, chosen.out)


def sweep(base: SimulatedRun, weeks: int) -> str:
    def row(name: str, runs: dict[str, SimulatedRun]) -> str:
        return f"| {name} | " + " · ".join(f"{value}: {percent(mean(run, weeks)[0])}" for value, run in runs.items()) + " |"

    def starts(seconds: float) -> SimulatedRun:
        return replace(base, recovery=replace(base.recovery, start_s=seconds))

    def failing(factor: float) -> SimulatedRun:
        return replace(base, rates=LLAMA3.scaled(factor), spares=round(32 * max(1, factor)))

    lines = [
        row("minutes between checkpoints", {str(minutes): replace(base, tiers=[disk(minutes)]) for minutes in (1, 2, 5, 10, 20, 30, 60)}),
        row("seconds that a checkpoint stalls training", {str(stall): replace(base, tiers=[disk(5, stall)]) for stall in (0, 1, 2, 5, 10, 20)}),
        row("seconds until processes have started", {str(start): starts(start) for start in (10, 30, 60, 120, 240, 480, 900)}),
        row("failures, as a multiple, with spare nodes in proportion", {str(factor): failing(factor) for factor in (0.5, 1, 2, 4, 8)}),
        row("GPUs, with spare nodes in proportion", {f"{gpus:,}": replace(base, gpus=gpus, spares=gpus // 512) for gpus in GPUS}),
        row("spare nodes", {str(spares): replace(base, spares=spares) for spares in (0, 2, 4, 8, 16, 32)}),
    ]  # fmt: skip
    return "\n".join(["| what | effective training time |", "| --- | --- |", *lines])


if __name__ == "__main__":
    main()
