"""A sidecar's worker inside this process, for a debugger."""

from collections.abc import Mapping
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.pod.failures import Role
from tandem.runtime.machine.gpus import pod_device
from tandem.runtime.rpc.calls import Method


def make_worker(role: Role, recipe: Recipe, directory: Path, threads: int) -> Mapping[str, Method]:
    """The calls of a fresh worker of ``role``. Imports torch, and only what this role needs."""
    import torch

    torch.set_num_threads(threads)
    if role == "trainer":
        from tandem.pod.trainer_worker import TrainerWorker
        from tandem.runtime.machine.rank_device import rank_device
        from tandem.trainer.rank_process import rank_alone

        return TrainerWorker(recipe, rank_alone(directory, rank_device(pod_device(recipe.machine), 0), threads)).methods()
    from tandem.pod.rollout_worker import RolloutWorker

    return RolloutWorker(recipe, directory).methods()
