"""Set on how many nodes a run draws its samples, while it runs on Ray: pods join it, or leave it after their iteration.

The weights that it ends with are the same. ray.max_nodes says how many there may be.

examples:
  tandem scale runs/sort 4
  tandem scale runs/sort 1        the controller's alone
"""

import argparse
from pathlib import Path

from tandem.cli.number_types import whole_number
from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", help="the folder of the run, for example runs/sort")
    parser.add_argument("nodes", metavar="NODES", type=whole_number, help="number of nodes, that of the controller included")


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.choose import launcher_of
    from tandem.cluster.launch.ray.launcher import RayLauncher

    directory = Path(options.run_directory)
    launcher = launcher_of(directory)
    if not isinstance(launcher, RayLauncher):
        raise UserError(f"the run in '{directory}' was placed by '{launcher.name}', which gives a run its nodes when it starts; only runs on Ray can be scaled")
    print(launcher.scale(directory, options.nodes))
    return 0
