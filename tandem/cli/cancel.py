"""Stop a run: it finishes its step, saves it and ends. 'tandem resume' continues it.

examples:
  tandem cancel runs/sort
  tandem cancel runs/sort --now        at once; it continues from its newest checkpoint
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("--now", action="store_true", help="do not wait for the step: end its processes, or its job, at once")


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.choose import launcher_of

    directory = Path(options.run_directory)
    print(launcher_of(directory).cancel(directory, at_once=options.now))
    return 0
