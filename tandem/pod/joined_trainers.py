"""The trainer's ranks in pods that joined from other machines: which pods have them, and how the controller calls those. Imports no torch.

Any pod that joined may have some: it has a shim for them beside that of its engines, in the same life and under the same token. It must have the run's
folder under the path that the run has it, because the ranks read the recipe and the model there and write their parts of checkpoints.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep

from tandem.pod.failures import SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.joining import Joining
from tandem.pod.rollout_pod import RolloutPod
from tandem.runtime.coordination.membership import members
from tandem.runtime.coordination.store import Store
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.rpc.calls import Blobs, Meta, Progress
from tandem.types import RunError
from tandem.types.wire import Frame

logger = logging.getLogger(__name__)
_POLL_S = 0.5
_STOP_S = 30.0


@dataclass(frozen=True)
class JoinedTrainer:
    """The trainer sidecar of ``pod``, with the calls of a ``RemoteChannel`` that ``TrainerPods`` makes."""

    pod: RolloutPod
    joining: Joining

    def start_shim(self) -> None:
        """Does nothing: it runs since the pod joined."""

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None, deadline_s: float | None = None
    ) -> Frame:
        """One call of its ranks. Raises ``SidecarDied`` for everything that keeps them from answering."""
        try:
            return self.pod.channel.call(name, meta, blobs, on_progress=on_progress, deadline_s=deadline_s)
        except SidecarDied as death:
            raise SidecarDied("trainer", death.part, f"{self.pod.name}: {death.reason}") from None

    def step_times(self, deadline_s: float) -> list[RankTimes]:
        """Returns where the time of each rank has gone, while a call of them is in progress. Raises ``SidecarDied``."""
        return self.pod.channel.step_times(deadline_s) if isinstance(self.pod.channel, JoinedChannel) else []

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        return tuple(self.call("allocate", {"bytes": size_bytes}).meta["names"])

    def stop_worker(self) -> None:
        self.call("stop_ranks", deadline_s=_STOP_S)

    def discard(self) -> None:
        """Stops its ranks. A pod that does not answer is left out altogether, so that it joins anew."""
        try:
            self.stop_worker()
        except SidecarDied as death:
            logger.warning("%s; it is left out", death)
            self.joining.forget(self.pod, "lost", death.reason)
            self.pod.channel.kill()

    def memory(self) -> dict[str, int]:
        """Returns zeros: its memory is not that of this machine."""
        return {"rss_bytes": 0, "shm_bytes": 0}

    def close(self) -> None:
        """Does nothing: the pod is released as a whole."""


@dataclass
class JoinedTrainers:
    """Chooses ``count`` of the pods that are ``joining``. ``open_store``: opens the store of the run. ``own_pods``: those that the run starts itself and that
    train; for messages. ``on_poll`` is called again and again while this waits for pods."""

    count: int
    own_pods: int
    joining: Joining
    open_store: Callable[[], Store]
    join_timeout_s: float
    on_poll: Callable[[], None] = lambda: None
    chosen: list[RolloutPod] = field(default_factory=list)
    _store: Store | None = None

    def choose(self) -> list[tuple[RolloutPod, str]]:
        """Returns the pods that have ranks from now on, with the host at which each is reached: those that are there with the lowest numbers. Waits until there
        are enough. Raises ``RunError`` after ``join_timeout_s``."""
        self._store = self._store or self.open_store()
        ends = monotonic() + self.join_timeout_s
        while True:
            self.on_poll()
            present = members(self._store)
            able = [pod for pod in self.joining.able_to_train(self._store, present) if pod.channel.is_running]
            if len(able) >= self.count:
                break
            if monotonic() > ends:
                raise RunError(self._missing(len(able)))
            sleep(_POLL_S)
        hosts = {member.name: str(member.facts["host"]) for member in present}
        self.chosen = able[: self.count]
        for pod in self.joining.lives.values():
            pod.trains = pod in self.chosen
        return [(pod, hosts[pod.name]) for pod in self.chosen]

    def why_replaced(self) -> str:
        """Returns why one of the chosen pods must have ranks no longer, because this run has cordoned its node while it works; empty: all may."""
        for pod in self.chosen:
            held = self.joining.nodes.drained(pod.name)
            if held is not None and pod.channel.is_running:
                return f"node {pod.name} is cordoned: {held.reason}"
        return ""

    def _missing(self, able: int) -> str:
        lives = [pod for pod in self.joining.lives.values() if pod.is_set_up and not pod.reaches_folder]
        unable = [f"{pod.name} does not have the run's folder '{self.joining.folder}' under this path" for pod in lives]
        why = f": {'; '.join(unable)} (pods that train need a file system that all of them share)" if unable else ""
        return (
            f"{self.own_pods + able} of pods.trainer_count {self.own_pods + self.count} pods that can train are there after pods.join_timeout_s "
            f"({self.join_timeout_s:g} s){why}; start more with 'tandem pod', then resume the run, or resume it with a lower --pods.trainer_count"
            f"{self.joining.why_few()}"
        )

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
