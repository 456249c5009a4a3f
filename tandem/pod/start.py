"""Put a pod's two channels together: sidecars in processes of their own, or both inline."""

import secrets
import shutil
from pathlib import Path

from tandem.config.machine import MachineConfig
from tandem.config.recipe import Recipe
from tandem.pod.channel import Channel, InlineChannel, RemoteChannel
from tandem.pod.failures import Role
from tandem.pod.worker import make_worker
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.processes import available_cores
from tandem.runtime.rpc.credentials import new_credential, write_credential
from tandem.types import UserError


def threads_of(machine: MachineConfig, at_once: int = 1) -> int:
    """Returns the threads of each worker: as configured, or the cores that this process may use, which as many workers as work ``at_once`` divide."""
    return machine.threads or max(1, available_cores() // at_once)


def pod_threads(recipe: Recipe) -> int:
    """Returns the threads of a pod's trainer and of its rollout, which take turns unless the rollout is one step ahead."""
    return threads_of(recipe.machine, at_once=2 if recipe.rollout.max_staleness else 1)


def rank_threads(recipe: Recipe) -> int:
    """Returns the threads of each rank of the trainer, which divide those of a worker."""
    return max(1, pod_threads(recipe) // recipe.parallel.world)


def open_channels(recipe: Recipe, directory: Path, inline: bool, faults: FaultPlan | None) -> tuple[Channel, Channel]:
    """Channels to the trainer's and to the rollout's sidecar; nothing runs yet. ``directory`` has the recipe's
    ``config.yaml``."""
    pod_id, folder, threads = secrets.token_hex(6), directory / "pod", pod_threads(recipe)
    # It has what the processes of a pod share while they live; those of an earlier start are dead, and so may be its bytes.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(0o700)

    def inline_channel(role: Role) -> Channel:
        return InlineChannel(role, pod_id, lambda: make_worker(role, recipe, directory, threads))

    if inline:
        if recipe.parallel.world > 1:
            raise UserError(f"--inline is one process and this run has {recipe.parallel.world} ranks; leave --inline out or set parallel to 1")
        return inline_channel("trainer"), inline_channel("rollout")
    credential = new_credential()
    write_credential(folder / "credential", credential)

    def remote_channel(role: Role) -> Channel:
        return RemoteChannel(
            role, directory, pod_id, folder / "credential", credential, recipe.machine.call_deadline_s, threads, faults
        )

    return remote_channel("trainer"), remote_channel("rollout")
