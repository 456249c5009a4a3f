"""The checkpoint memory of a node of a run on Ray: an actor outside the run's placement groups, which stays when the controller's node is lost and Ray ends the
pods with it. It ends with the job: when the job's group has been removed, or has waited for a node for longer than a pod waits for its run."""

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.launch.addresses import own_address
from tandem.cluster.launch.ended import read_end
from tandem.cluster.launch.job import read_job
from tandem.cluster.launch.node_keeper import NodeKeeper, keeps_checkpoints
from tandem.cluster.launch.ray.nodes import end_with_node, node_name
from tandem.cluster.launch.ray.placement import CONTROLLER, NAMESPACE, group_name, groups_of
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.records.logs import setup
from tandem.trainer.checkpoint.memory.launched_keepers import keeper_path
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
_LOOK_S, _START_S = 2.0, 120.0


def node_keeper(job: str, directory: Path, host: str) -> Path | None:
    """Returns the file of this node's keeper for ``job``, the run in ``directory`` whose controller is at ``host``; ``None`` without checkpoints in memory. It
    is started where there is none. Raises ``RunError`` if it does not start."""
    _, recipe = read_job(directory)
    if not keeps_checkpoints(recipe):
        return None
    name = node_name()
    # No cores and no memory of a placement group, which would end it with its owner.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = ray.remote(KeeperActor).options(
        name=group_name(job, f"keeper-{name}"), namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, scheduling_strategy=here
    )
    try:
        keeper: Any = options.remote(job, str(directory), str(Path.cwd()), host)
        ray.get(keeper.start.remote(), timeout=_START_S)
    except ray.exceptions.RayError as error:
        raise RunError(f"the checkpoint memory of node '{name}' did not start: {str(error).strip().splitlines()[-1]}") from None
    return keeper_path(directory, name)


def end_node_keeper(job: str, pod: str) -> None:
    """Ends this node's keeper for ``job``, which ``pod`` leaves, unless another pod of the job is here."""
    name = node_name()
    if not any(node == name and role not in (CONTROLLER, pod) for role, (_, node) in groups_of(job).items()):
        # There is none without checkpoints in memory.
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.get_actor(group_name(job, f"keeper-{name}"), namespace=NAMESPACE).end.remote()


class KeeperActor:
    """The keeper of this node for ``job``, the run in ``directory`` whose controller is reached at ``host``."""

    def __init__(self, job: str, directory: str, folder: str, host: str) -> None:
        os.chdir(folder)
        self._job, self._directory, self._host = job, Path(directory), host
        setup(f"keeper-{node_name()}", self._directory / "logs")
        end_with_node()
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        # The kernel ends the keeper with the thread that started it.
        threading.Thread(target=self._work, name="keeper", daemon=True).start()

    def start(self) -> None:
        """Returns when the keeper can be called. Its actor has died if it does not start."""
        self._is_ready.wait()

    def end(self) -> None:
        """Lets it end: its node is not one of the run any more."""
        self._is_over.set()

    def _work(self) -> None:
        try:
            _, recipe = read_job(self._directory)
            with contextlib.closing(NodeKeeper(self._directory, recipe, node_name(), own_address(self._host))) as keeper:
                self._keep(keeper, recipe.pods.join_timeout_s)
        except (UserError, RunError) as error:
            logger.warning("keeps no checkpoints in memory: %s", error)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _keep(self, keeper: NodeKeeper, lease_s: float) -> None:
        """Keeps ``keeper`` running until its job has ended, or has had no node for ``lease_s``."""
        waiting = Deadline(lease_s)
        while not waiting.passed and (keeper.look() or self._is_ready.is_set()):
            self._is_ready.set()
            if self._is_over.wait(_LOOK_S):
                return
            state = _state_of(self._job)
            if state == "" or read_end(self._directory, self._job) is not None:
                return
            if state == "CREATED":
                waiting = Deadline(lease_s)


def _state_of(job: str) -> str:
    """Returns Ray's word for the state of the controller's placement group; empty once it has been removed."""
    try:
        return str(placement_group_table(get_placement_group(group_name(job, CONTROLLER)))["state"])
    except ValueError:
        return ""
    except ray.exceptions.RayError:
        # Ray's head is away for a while.
        return "UNKNOWN"
