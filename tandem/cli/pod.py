"""Start a pod on this machine that draws samples, or trains, for a run on another one.

The pod joins the run that 'tandem train' makes of the same recipe, by its run.name, through the etcd of section coordination, and draws samples from the
next iteration on. The run sends it everything else, the weights included. It ends with the run; SIGTERM or Ctrl-C lets it leave after the iteration, a
second one at once. pods.max_count says how many pods there may be, pods.host is the address of this machine, and pods.credential_file a file with the
secret of the run's pods. Where pods.trainer_count is more than pods.count, it may have ranks of the trainer, if it has the run's folder under the same path.
For a run on data it has ranks alone, which read their share of the data on this machine.
Needs the extra 'serve'. The machine is measured before it joins (cluster.preflight), and the run does not use one that is not fit.

examples:
  tandem pod sort.yaml --pods.host=10.0.0.2
  tandem pod sort.yaml --pods.host=10.0.0.2 --pods.port=9100 --name rollout-1
"""

import argparse
import re
import socket
from pathlib import Path

from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the recipe of the run: a YAML file, or the name of one that comes with Tandem")
    parser.add_argument("--name", default=socket.gethostname(), help="of this pod in the run (default: that of the machine)")
    parser.add_argument("--folder", type=Path, help="of the pod's files and logs (default: RUN.DIRECTORY/RUN_NAME.pods/NAME)")
    parser.add_argument("--rollout-only", action="store_true", help="it draws samples, and gets no ranks of the trainer")
    parser.add_argument("--keeper", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.health.measure import measure_node
    from tandem.config.recipe import Recipe, load_config
    from tandem.pod.joining_pod import serve_run
    from tandem.runtime.process.processes import threads_of

    recipe = load_config(options.recipe, options.overrides)
    if not isinstance(recipe, Recipe):
        if not recipe.pods.may_join:
            raise UserError("'pods.trainer_count' is 1, so all ranks of this run are on one machine; set it to the number of machines")
        if options.rollout_only:
            raise UserError(f"--rollout-only is given and {options.recipe} trains on data and draws no samples; leave it out")
    elif not recipe.pods.may_join:
        raise UserError(f"'pods.max_count' is {recipe.pods.max_count} and pods.count {recipe.pods.count}, so no pod can join this run; set pods.max_count")
    if not re.fullmatch(r"\w[\w.-]*", options.name) or re.fullmatch(r"pod-\d+", options.name):
        raise UserError(f"--name is '{options.name}'; use letters, digits, '.', '_' and '-', and not pod-NUMBER, which are the pods of the run itself")
    folder = options.folder or Path(recipe.run.directory) / f"{recipe.run.name}.pods" / options.name
    report = None
    if recipe.cluster.preflight:
        print(f"pod {options.name} measures this machine (cluster.preflight)", flush=True)
        report = measure_node(options.name, recipe.machine)
    return serve_run(
        recipe.run.name, recipe.coordination, recipe.pods, name=options.name, folder=folder, threads=threads_of(recipe.machine), faults=options.fault,
        health=recipe.health, report=report, trains=not options.rollout_only, keeper=options.keeper,
        kept_in=recipe.checkpoint.memory_directory,
    )  # fmt: skip
