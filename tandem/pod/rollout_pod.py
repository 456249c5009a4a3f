"""The rollout sidecar of one pod, and its workers, as the controller calls them."""

from dataclasses import dataclass

from tandem.pod.channel import RemoteChannel
from tandem.pod.failures import PodLost, SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, WorkerDied
from tandem.types.wire import Frame


@dataclass(eq=False)
class RolloutPod:
    """The rollout sidecar of pod ``number`` with ``workers`` workers. ``own_store``: the address of the pod's own store, in which its engines find the
    weights of its pod; empty: it is the first pod, whose engines read that of the run. ``trains``: the pod has ranks of the trainer, which publish the weights
    there; else it receives them. ``name``: of a pod that joined from elsewhere; ``revision``: of its joining; ``version``: of its Tandem; ``is_encrypted``: it
    answers under TLS; ``is_set_up``: it works for this controller; ``is_begun``: its engines are started, or have been, or it takes part
    without any; ``reaches_folder``: it has the run's folder under the path that the run has it."""

    number: int
    channel: RemoteChannel | JoinedChannel
    workers: int
    own_store: str = ""
    trains: bool = False
    name: str = ""
    revision: int = 0
    version: str = ""
    is_encrypted: bool = False
    is_set_up: bool = False
    is_begun: bool = False
    reaches_folder: bool = False

    @property
    def receives(self) -> bool:
        """Whether weights come to this pod from another one."""
        return bool(self.own_store) and not self.trains

    def ask(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, deadline_s: float | None = None, on_progress: Progress | None = None
    ) -> Frame:
        """Calls the sidecar. Raises ``WorkerDied`` for a worker of it, ``PodLost`` if the sidecar is gone, ``SidecarDied`` if the trainer's is."""
        try:
            return self.channel.call(name, meta, blobs, deadline_s=deadline_s, on_progress=on_progress)
        except SidecarDied as death:
            if death.role == "trainer":
                raise
            if death.part == "worker":
                raise WorkerDied(f"a rollout worker of pod {self.number}", name, death.reason) from None
            raise PodLost(self.number, name, death.reason) from None


@dataclass(frozen=True)
class PodWorker:
    """Worker ``number`` of a pod, as ``RolloutWorkers`` calls it."""

    pod: RolloutPod
    number: int

    def call(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, deadline_s: float, on_progress: Progress | None = None) -> Frame:
        return self.pod.ask(name, {**(meta or {}), "worker": self.number}, blobs, deadline_s=deadline_s, on_progress=on_progress)
