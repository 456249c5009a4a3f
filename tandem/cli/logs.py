"""Show what a run says: the output of its job, or the log of the process that leads it.

Every process of a run has a log of its own in RUN/logs; --role shows one of them.

examples:
  tandem logs runs/sort
  tandem logs runs/sort --follow
  tandem logs runs/sweep-*                 of each run of an array, one after the other
  tandem logs runs/sort --role trainer_worker --role pods/n2/rollout_shim
"""

import argparse
from pathlib import Path

from tandem.cli.several_runs import for_each_run
from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", nargs="+", help="the folder of the run, for example runs/sort, or those of several")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is written, until the run has ended")
    parser.add_argument("--role", action="append", metavar="ROLE", help="the log of a process, as it is named in RUN/logs; may be repeated")


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.choose import launcher_of
    from tandem.cluster.launch.log_files import follow, role_files, show

    if len(options.run_directory) > 1:
        return _several(options)
    directory = Path(options.run_directory[0])
    chosen = launcher_of(directory)

    def files() -> tuple[Path, ...]:
        return role_files(directory, options.role) if options.role else chosen.logs(directory)

    if options.follow:
        follow(files, lambda: chosen.status(directory).is_active)
        return 0
    if not (there := files()):
        raise UserError(f"the run in '{directory}' has written nothing yet; 'tandem status' says where it is, and --follow waits")
    show(there)
    return 0


def _several(options: argparse.Namespace) -> int:
    """Shows what each of several runs says, under its folder."""
    from tandem.cluster.launch.choose import launcher_of
    from tandem.cluster.launch.log_files import role_files, show

    if options.follow:
        raise UserError(f"--follow is for one run, and there are {len(options.run_directory)}; name one")

    def show_one(directory: Path) -> None:
        print(f"== {directory}", flush=True)
        show(role_files(directory, options.role) if options.role else launcher_of(directory).logs(directory))

    return for_each_run(options.run_directory, show_one)
