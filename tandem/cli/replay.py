"""Repeat a recorded step and compare every number with the run's record.

Reinforcement learning: a new pod loads the newest checkpoint at or before the step, repeats the steps in between from the
journal, then draws the samples of the step, scores them and trains on them again. The run's files are only read. Exits with 0
if everything is equal bit for bit, and with 1 otherwise, listing the differences.

Pretraining and fine-tuning: the step is repeated on its mesh, after the steps between it and the checkpoint. If it was skipped
as not finite, its dumped batch is run in one process to find the first layer, sequence and parameter that are not finite.

With --against the step is replayed here and by the Tandem of another environment, and the first tensor is named that differs: samples,
weights, the output of a layer, a gradient. The weights before the step differ first where an earlier step does.

examples:
  tandem replay runs/sort --step 12
  tandem replay runs/sort --step 12 --only rewards      does a reward function return the same scores?
  tandem replay runs/sort --step 12 --inline            in one process, for a debugger
  tandem replay runs/pretrain --step 300                a step of pretraining; of a skipped step, the cause
  tandem replay runs/sort --step 12 --against ../old/.venv    what did the last change of the code change?
"""

import argparse
from pathlib import Path

from tandem.types import UserError

MOST_SHOWN = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--step", type=int, required=True, help="the step; the first is 0")
    parser.add_argument("--only", action="append", choices=("rollout", "rewards", "train"), help="replay only this part of the step; may be repeated")
    parser.add_argument("--inline", action="store_true", help="run both sidecars in this process, for a debugger")
    parser.add_argument("--against", metavar="ENVIRONMENT", help="compare with the Tandem of another Python, or of the virtual environment in this folder")
    parser.add_argument("--record", metavar="FOLDER", help="write the digests of the replay's tensors to this new folder, as --against does")


def run(options: argparse.Namespace) -> int:
    from tandem.jobs.replay.comparison import PARTS
    from tandem.jobs.replay.replay_step import replay

    if options.step < 0:
        raise UserError(f"--step is {options.step}; a run's first step is 0")
    if options.against is not None:
        return _against(options)
    comparisons = replay(
        options.run_directory, options.step, options.only or PARTS, inline=options.inline, say=lambda line: print(line, flush=True),
        record=None if options.record is None else Path(options.record),
    )  # fmt: skip
    for comparison in comparisons:
        unequal = len(comparison.differences)
        print(f"{comparison.part}: {comparison.count - unequal} of {comparison.count} {comparison.how}")
        for line in comparison.differences[:MOST_SHOWN]:
            print(f"  {line}")
        if unequal > MOST_SHOWN:
            print(f"  and {unequal - MOST_SHOWN} more")
    return int(any(comparison.differences for comparison in comparisons))


def _against(options: argparse.Namespace) -> int:
    from tandem.jobs.replay.against import replay_against
    from tandem.jobs.replay.comparison import PARTS

    if options.record is not None:
        raise UserError("--against writes its own records; leave --record out")
    compared = replay_against(
        options.run_directory, options.step, options.only or PARTS, options.against, inline=options.inline, say=lambda line: print(line, flush=True)
    )
    print(f"{compared.equal} of {compared.count} tensors equal bit for bit")
    if compared.unmatched:
        print(f"{compared.unmatched} more are computed by one of the two versions only")
    if compared.first is None:
        return 0
    place, here, there = compared.first
    print(f"first difference: step {here.step}, {here.stage}, {place}: {here.name} (norm {here.norm!r} here, {there.norm!r} there)")
    return 1
