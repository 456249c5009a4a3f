"""Put a pod's two channels together: sidecars in processes of their own, or both inline."""

import secrets
import shutil
from pathlib import Path

from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe
from tandem.pod.channel import Channel, InlineChannel, RemoteChannel
from tandem.pod.failures import Role
from tandem.pod.worker import make_worker
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.processes import available_cores
from tandem.runtime.rpc.credentials import new_credential, write_credential
from tandem.types import UserError


def threads_of(machine: MachineConfig) -> int:
    """Returns the threads of each worker: as configured, or every core this process may use (the workers take turns)."""
    return machine.threads or available_cores()


def rank_threads(machine: MachineConfig, parallel: ParallelConfig) -> int:
    """Returns the threads of each rank of the trainer, which divide those of a worker."""
    return max(1, threads_of(machine) // parallel.world)


def open_channels(recipe: Recipe, directory: Path, inline: bool, faults: FaultPlan | None) -> tuple[Channel, Channel]:
    """Channels to the trainer's and to the rollout's sidecar; nothing runs yet. ``directory`` has the recipe's
    ``config.yaml``."""
    pod_id, folder, threads = secrets.token_hex(6), directory / "pod", threads_of(recipe.machine)
    # What a controller left that was killed.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)

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
