"""Run one recorded step again and compare every number with what the run wrote down.

A pod of its own loads the newest checkpoint at or before the step, repeats the steps between from the journal, then draws the
step's samples, judges them and trains on them again. The run's files are only read. Exits 0 where everything is equal bit for
bit, and 1 where something is not, naming it.

A step of pretraining or fine-tuning is run again on the mesh that it was taken on, after those between it and the checkpoint. Where it was left out because
something was not finite, its kept batch is run in one process, and one screen says which layer, sequence and parameter come first.

examples:
  tandem replay runs/sort --step 12
  tandem replay runs/sort --step 12 --only rewards      does a reward function give the same scores twice?
  tandem replay runs/sort --step 12 --inline            one process, for a debugger
  tandem replay runs/pretrain --step 300                a step of pretraining; one that was left out says why
"""

import argparse

from tandem.types import UserError

MOST_SHOWN = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--step", type=int, required=True, help="which step; a run's first is 0")
    parser.add_argument("--only", action="append", choices=("rollout", "rewards", "train"), help="a part of the step; may be given several times")
    parser.add_argument("--inline", action="store_true", help="both sidecars in this process, for a debugger")


def run(options: argparse.Namespace) -> int:
    from tandem.jobs.replay.comparison import PARTS
    from tandem.jobs.replay.replay_step import replay

    if options.step < 0:
        raise UserError(f"--step is {options.step}; a run's first step is 0")
    comparisons = replay(
        options.run_directory, options.step, options.only or PARTS, inline=options.inline, say=lambda line: print(line, flush=True)
    )
    for comparison in comparisons:
        unequal = len(comparison.differences)
        print(f"{comparison.part}: {comparison.count - unequal} of {comparison.count} {comparison.how}")
        for line in comparison.differences[:MOST_SHOWN]:
            print(f"  {line}")
        if unequal > MOST_SHOWN:
            print(f"  and {unequal - MOST_SHOWN} more")
    return int(any(comparison.differences for comparison in comparisons))
