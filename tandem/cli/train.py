"""Train a model from a recipe.

The run writes runs/NAME/{config.yaml, journal.sqlite, metrics.jsonl, checkpoints/, logs/, report.html, model/}.
Any key of the recipe can be set on the command line: --section.key=value.

examples:
  tandem train sort                               a recipe that comes with Tandem, by name; 'tandem recipes' lists them
  tandem train recipes/sort.yaml
  tandem train recipes/sort.yaml --run.seed=1 --run.name=second
  tandem train recipes/sort.yaml --residents.plan=terminate
  tandem train recipes/sort.yaml --dry-run        check the recipe and print the memory plan
  tandem train recipes/pretrain.yaml --parallel.data=2 --parallel.zero=1      two processes with the optimizer's state sharded
  tandem train recipes/sort.yaml --inline         in one process, for a debugger
  tandem train recipes/sort.yaml --coordination etcd      publish weights and elect the controller in the etcd on this machine
  tandem train recipes/sort.yaml --pods 2         a second pod draws samples too
  tandem train recipes/sort.yaml --pods 2 --trainer-pods 2 --parallel.data=2      both train, too
  tandem train recipes/sort.yaml --on slurm --slurm.partition=gpu --slurm.time=0-08:00:00      as a job of Slurm; with --dry-run its script
  tandem train recipes/sort.yaml --on slurm --array sweep.yaml      a run for each item of its list 'runs'
  tandem train recipes/sort.yaml --on ray --ray.nodes=3      over three nodes of Ray; without ray.address a Ray on this machine is started for it
  tandem train recipes/sort.yaml --on kubernetes --kubernetes.image=REGISTRY/tandem:0.1.0 --kubernetes.claim=runs      as a JobSet
  tandem train recipes/sort.yaml --rollout vllm   vLLM draws the samples ('tandem sidecar install vllm' makes its environment)
"""

import argparse
from pathlib import Path

from tandem.cluster.launch.launcher import LAUNCHERS, Launch
from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe that comes with Tandem ('tandem recipes')")
    parser.add_argument("--on", choices=LAUNCHERS, default="local", help="where it runs: on this machine, on Slurm, Ray or Kubernetes ('docs/cluster.md')")
    parser.add_argument("--inline", action="store_true", help="run both sidecars in this process, for a debugger")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print the plan, or the script of the job, and exit")
    parser.add_argument("--coordination", choices=("embedded", "etcd"), help="short for --coordination.store")
    parser.add_argument("--pods", type=int, metavar="N", help="short for --pods.count")
    parser.add_argument("--trainer-pods", type=int, metavar="N", help="short for --pods.trainer_count")
    parser.add_argument("--rollout", choices=("tandem", "vllm"), help="short for --rollout.backend")
    parser.add_argument("--trainer", choices=("tandem", "megatron", "deepspeed"), help="short for --trainer.backend")
    parser.add_argument("--array", metavar="FILE", help="with --on slurm: a YAML file with a list of overrides, each a run of its own in a job array")
    parser.add_argument("--array-limit", type=int, default=0, metavar="N", help="runs of the array at once (default: all)")
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from tandem.cluster.launch.choose import launcher

    short = {
        "coordination.store": options.coordination, "pods.count": options.pods, "pods.trainer_count": options.trainer_pods,
        "rollout.backend": options.rollout, "trainer.backend": options.trainer,
    }  # fmt: skip
    overrides = (*(f"--{key}={value}" for key, value in short.items() if value is not None), *options.overrides)
    if (options.array is not None or options.array_limit) and options.on != "slurm":
        raise UserError(f"--array is for --on slurm, and this run is --on {options.on}; start the runs one by one, or give --on slurm")
    if options.array_limit and options.array is None:
        raise UserError("--array-limit is given without --array, the file with the runs")
    array: tuple[tuple[str, ...], ...] = ()
    if options.array is not None:
        from tandem.cluster.launch.slurm.array import read_array

        array = read_array(Path(options.array))
    launch, chosen = Launch(options.recipe, overrides, options.inline, options.fault, array, options.array_limit), launcher(options.on)
    print(chosen.plan(launch) if options.dry_run else chosen.submit(launch).text)
    return 0
