"""The fork server that the trainer's rank and the rollout worker of a pod share: both are forked from one process that has imported torch once."""

import socket
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.estimate.processes import share_fork_server
from tandem.layout.placement import mesh_of
from tandem.runtime.process.forks import ForkServer
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker_group import RANK_MODULE, may_fork

MODULES = ("tandem.pod.trainer_worker", "tandem.pod.rollout_worker", RANK_MODULE)


class PodForks:
    """Owns the server, which is begun when a sidecar first needs it, and again where it has ended. ``threads``: of each worker."""

    def __init__(self, directory: Path, threads: int) -> None:
        self._directory, self._threads = directory, threads
        self._server: ForkServer | None = None

    def connect(self) -> socket.socket:
        """Returns a connection for a shim that is about to be started; its imports go on meanwhile."""
        if self._server is None or not self._server.alive:
            self.close()
            output = self._directory / "logs" / "pod-forks.out"
            output.parent.mkdir(parents=True, exist_ok=True)
            self._server = ForkServer(MODULES, threads=Threads(self._threads), output=output)
        return self._server.share()

    def close(self) -> None:
        """Ends the server, and the workers with it."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def pod_forks(recipe: Recipe, directory: Path, threads: int) -> PodForks | None:
    """Returns the server of the trainer and the rollout sidecar of a run; ``None`` where each has one of its own. ``threads``: of each sidecar."""
    is_ours = recipe.rollout.backend == "tandem" and recipe.machine.fork_workers and may_fork()
    pods, ranks = recipe.pods, mesh_of(recipe.parallel).world
    alike = is_ours and share_fork_server(recipe.trainer, ranks, recipe.rollout.workers, max(pods.count, pods.trainer_count))
    return PodForks(directory, threads) if alike else None
