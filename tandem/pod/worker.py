"""A sidecar's worker process: ``python -m tandem.pod.worker --role trainer|rollout --run DIR --channel FD``."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from tandem.config.load import build, read_yaml
from tandem.config.recipe import Recipe
from tandem.runtime.calls import Method
from tandem.runtime.faults import FaultPlan, no_fault
from tandem.runtime.logs import setup
from tandem.runtime.worker import serve


def make_worker(role: str, recipe: Recipe, directory: Path, threads: int) -> Mapping[str, Method]:
    """The calls of a fresh worker of ``role``. Imports torch, and only what this role needs."""
    import torch

    torch.set_num_threads(threads)
    if role == "trainer":
        from tandem.pod.trainer_worker import TrainerWorker

        return TrainerWorker(recipe, directory).methods()
    from tandem.pod.rollout_worker import RolloutWorker

    return RolloutWorker(recipe, directory).methods()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("trainer", "rollout"), required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--faults", default="")
    options = parser.parse_args()
    directory = Path(options.run)
    setup(f"{options.role}_worker", directory / "logs")
    recipe = build(Recipe, read_yaml(directory / "config.yaml"))
    point = FaultPlan.parse(options.faults).point(f"{options.role}_worker", directory) if options.faults else no_fault
    serve(make_worker(options.role, recipe, directory, options.threads), options.channel, fault_point=point)


if __name__ == "__main__":
    main()
