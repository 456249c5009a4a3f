"""Our side of the benchmarks of a whole step: a run of the command, with all its processes, which waits for a line before every step.

``tandem_run.py RUN``, a folder with the recipe's ``config.yaml``; commands are those of ``trl_grpo.py``, without ``save``. A step is all that a run does from
one row of ``metrics.jsonl`` to the next; of reinforcement learning: weights to the engine, prompts, rollout, rewards in their own process, the reference's
pass where the recipe asks for one, update, journal and row. The first step is taken before the first command; the first answer is its.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from clock import PhaseClock, Stopwatch, cpu_of, family
from lines import answer, command

import tandem

PHASES = {"rollout": "rollout", "inference": "inference", "train": "train"}
"""Names of the run's phases and of the benchmark's; every other one is part of the weight update."""
METRICS = {
    "reward/mean": "reward", "response_length/mean": "mean_length", "mismatch_kl": "mismatch_kl", "train/loss": "loss",
    "perf/shared_prompt_share": "shared_share",
}  # fmt: skip
"""Names of the row's metrics and of the answer's."""


class Driven(tandem.Callback):
    """Ends the step with its row, and waits for the next command."""

    def __init__(self) -> None:
        self.watch, self.phases, self.quits = Stopwatch(), PhaseClock(), False

    def phase(self, name: str, step: int) -> None:
        self.phases.enter(PHASES.get(name, "weight update"))

    def row(self, row: Mapping[str, float | int | str]) -> None:
        measured = {"step": row["step"], **{said: row[name] for name, said in METRICS.items() if name in row}}
        if row["step"] == 0:
            children = family(os.getpid())[1:]
            self.phases.judges = [pid for pid in children if "reward" in Path(f"/proc/{pid}/cmdline").read_text()]
            self.phases.children = [pid for pid in children if pid not in self.phases.judges]
            answer(**measured)
        else:
            answer(**measured, **self.phases.end(), **self.watch.stop())
        self.quits = command()[0] == "quit"
        self.watch.start()
        self.phases.begin("weight update")

    def wants_stop(self) -> bool:
        return self.quits


def main() -> None:
    assert cpu_of([os.getpid()]) > 0, "the clocks of other processes cannot be read here"
    try:
        tandem.train(Path(sys.argv[1]) / "config.yaml", callbacks=[Driven()], progress=False)
    except tandem.RunError as stopped:
        print(stopped, file=sys.stderr)


main()
