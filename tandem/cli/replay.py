"""Repeat a recorded step and compare every number with the run's record.

Reinforcement learning: a new pod loads the newest checkpoint at or before the step, repeats the steps in between from the
journal, then draws the samples of the step, scores them and trains on them again. The run's files are only read. Exits with 0
if everything is equal bit for bit, and with 1 otherwise, listing the differences.

Pretraining and fine-tuning: the step is repeated on its mesh, after the steps between it and the checkpoint. If it was skipped
as not finite, its dumped batch is run in one process to find the first layer, sequence and parameter that are not finite.

examples:
  tandem replay runs/sort --step 12
  tandem replay runs/sort --step 12 --only rewards      does a reward function return the same scores?
  tandem replay runs/sort --step 12 --inline            in one process, for a debugger
  tandem replay runs/pretrain --step 300                a step of pretraining; of a skipped step, the cause
"""

import argparse

from tandem.types import UserError

MOST_SHOWN = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--step", type=int, required=True, help="the step; the first is 0")
    parser.add_argument("--only", action="append", choices=("rollout", "rewards", "train"), help="replay only this part of the step; may be repeated")
    parser.add_argument("--inline", action="store_true", help="run both sidecars in this process, for a debugger")


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
