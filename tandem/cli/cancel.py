"""Stop a run: it finishes its step, saves it and ends. 'tandem resume' continues it.

examples:
  tandem cancel runs/sort
  tandem cancel runs/sweep-*           all of an array
  tandem cancel runs/sort --now        at once; it continues from its newest checkpoint
"""

import argparse
from pathlib import Path

from tandem.cli.several_runs import for_each_run


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", nargs="+", help="the folder of the run, for example runs/sort, or those of several")
    parser.add_argument("--now", action="store_true", help="do not wait for the step: end its processes, or its job, at once")


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.choose import launcher_of

    if len(options.run_directory) == 1:
        directory = Path(options.run_directory[0])
        print(launcher_of(directory).cancel(directory, at_once=options.now))
        return 0

    def cancel(directory: Path) -> None:
        # Of several runs those that have ended are no error.
        chosen = launcher_of(directory)
        said = chosen.cancel(directory, at_once=options.now) if chosen.status(directory).is_active else "not running"
        print(f"{directory}: {said}")

    return for_each_run(options.run_directory, cancel)
