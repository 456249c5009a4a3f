"""The trainer sidecars of several pods, called as one: the pod's cycle sees one trainer, however many pods have its ranks. Imports no torch.

The pods divide the data-parallel replicas of one mesh. They are those that the run starts itself, and others that joined (``joined_trainers``). A call goes to
every pod at once, and the first pod's reply is the trainer's. Each pod's ranks publish the weights in their own pod's shared memory and store, from which the
engines beside them take them; the first pod's are those that all others receive. A pod that fails ends the trainer of all: it is replaced as a whole, from the
newest checkpoint.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tandem.pod.calls import TRAINER_CALLS
from tandem.pod.channel import RemoteChannel
from tandem.pod.failures import SidecarDied
from tandem.pod.joined_trainers import JoinedTrainer, JoinedTrainers
from tandem.pod.own_ranks import OwnRanks
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.rpc.calls import Blobs, Meta, Progress
from tandem.runtime.traces.context import in_context
from tandem.types.wire import Frame

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

GRACE_S = 3.0
"""Seconds that the other pods have to say what they know after the first one has failed: a rank that died is named by its own pod."""
_POLL_S = 0.2
_PATHS = ("folder", "start", "critic", "draft")
"""Arguments of calls that are paths in the run's folder."""


@dataclass(frozen=True)
class TrainerPod:
    """The trainer sidecar of pod ``number`` with ``ranks``, whose machine others reach at ``host``. ``own_store``: the address of the pod's own store, in which
    its ranks publish the weights; empty: it is the first pod, which publishes in the store of the run."""

    number: int
    channel: RemoteChannel | JoinedTrainer | OwnRanks
    ranks: tuple[int, ...]
    host: str
    own_store: str = ""

    @property
    def node(self) -> str:
        """The name of its machine: for one that joined, that of the pod."""
        return self.channel.pod.name if isinstance(self.channel, JoinedTrainer) else socket.gethostname()


@dataclass
class TrainerPods:
    """A ``Channel`` to the trainer sidecars of ``own_pods``, of which the first has rank 0, and of pods that ``joined`` (``None``: there are none).
    ``shares``: the ranks of each pod. ``directory``: the run's folder, which all of them reach. ``threads``: of each rank. ``pods``: those that have
    the ranks now. ``is_up``: the ranks of all pods run. ``buffers``: the weight buffers of each pod, by its number. ``own``: what the start of ranks is
    told beside their share."""

    own_pods: Sequence[TrainerPod]
    directory: Path
    threads: int
    shares: Sequence[tuple[int, ...]] = ()
    joined: JoinedTrainers | None = None
    pods: list[TrainerPod] = field(default_factory=list)
    is_up: bool = False
    buffers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    own: Meta = field(default_factory=dict)
    is_remote: bool = field(default=True, init=False)

    def start(self) -> None:
        """Starts the ranks of all pods where they do not run. Ranks of one pod alone would find nobody, so a pod is never started by itself."""
        if self.is_up:
            return
        self.pods = [*self.own_pods, *self._joined()]
        self._each(lambda pod: pod.channel.start_shim())
        rendezvous = ""
        for pod in self.pods:
            share = {"ranks": pod.ranks, "host": pod.host, "rendezvous": rendezvous, "directory": str(self.directory.absolute()), "threads": self.threads}
            rendezvous = str(pod.channel.call("start_ranks", {**share, **self.own}).meta["rendezvous"])
        self.is_up = True

    def _joined(self) -> list[TrainerPod]:
        """The pods of other machines that have the shares which are left."""
        if self.joined is None:
            return []
        left, chosen = self.shares[len(self.own_pods) :], self.joined.choose()
        # Each knows its own store.
        return [
            TrainerPod(pod.number, JoinedTrainer(pod, self.joined.joining), ranks, host, pod.own_store)
            for (pod, host), ranks in zip(chosen, left, strict=True)
        ]

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> Frame:  # fmt: skip
        """One call of the trainer. Calls that concern the first pod alone, as those that serve its weights, go to no other. ``on_poll`` is called again and
        again while this waits."""
        if name not in TRAINER_CALLS:
            return self.pods[0].channel.call(name, meta, blobs, on_progress=on_progress)
        if self.joined is not None and (why := self.joined.why_replaced()):
            self.is_up = False
            raise SidecarDied("trainer", "worker", why)
        told: SimpleQueue[dict[str, Any]] = SimpleQueue()

        def ask(pod: TrainerPod) -> Frame:
            return pod.channel.call(name, self._own(pod, name, meta or {}), blobs, on_progress=told.put if pod is self.pods[0] else None)

        # Not closed: the call of a pod that others wait for in vain ends when its ranks are stopped.
        pool = ThreadPoolExecutor(len(self.pods), thread_name_prefix="trainer-pod")
        calls = [pool.submit(in_context(ask), pod) for pod in self.pods]
        pool.shutdown(wait=False)
        left = set(calls)
        while left:
            on_poll()
            left = wait(left, timeout=_POLL_S, return_when=FIRST_COMPLETED).not_done
            # Progress is reported from this thread, in order, before the call returns.
            while not told.empty():
                progress = told.get()
                if on_progress is not None:
                    on_progress(progress)
            if any(call.done() and call.exception() is not None for call in calls):
                self._raise(calls)
        replies = [call.result() for call in calls]
        if "step_times" in replies[0].meta:
            replies[0].meta["step_times"] = [
                RankTimes.from_json(each).on(pod.node, pod.host).to_json()
                for pod, reply in zip(self.pods, replies, strict=True) for each in reply.meta["step_times"]
            ]  # fmt: skip
            replies[0].meta["nodes"] = {str(rank): pod.node for pod in self.pods for rank in pod.ranks}
        if name == "register":
            self._check_equal([str(reply.meta["digest"]) for reply in replies])
        return replies[0]

    def _own(self, pod: TrainerPod, name: str, meta: Meta) -> Meta:
        """Returns the arguments of a call with what each pod has of its own."""
        # Pods on other machines work in other folders.
        meta = {**meta, **{key: str(Path(meta[key]).absolute()) for key in _PATHS if key in meta}}
        if (tiers := meta.get("tiers")) is not None:
            memory, local = tiers["memory"], tiers["local"]
            memory = None if memory is None else {**memory, "nodes": [pod.host] * len(memory["nodes"])}
            meta["tiers"] = {**tiers, "memory": memory, "local": None if local is None else {**local, "node": pod.host}}
        if name != "register" or not pod.own_store:
            return meta
        return {**meta, "buffers": list(self.buffers[pod.number]), "store": pod.own_store, "guard": None, "announces": False}

    def _raise(self, calls: Sequence["Future[Frame]"]) -> None:
        """Raises the error that ended a call: what is no death of a sidecar first, else what every pod that failed says."""
        wait(calls, timeout=GRACE_S)
        self.is_up = False
        errors = {pod.number: call.exception() for pod, call in zip(self.pods, calls, strict=True) if call.done() and call.exception() is not None}
        deaths = {number: error for number, error in errors.items() if isinstance(error, SidecarDied)}
        for error in errors.values():
            if error is not None and not isinstance(error, SidecarDied):
                raise error
        lost_shim = any(death.part == "shim" for death in deaths.values())
        raise SidecarDied("trainer", "shim" if lost_shim else "worker", "; ".join(f"pod {number}: {death.reason}" for number, death in deaths.items()))

    def _check_equal(self, digests: Sequence[str]) -> None:
        """Raises ``SidecarDied`` if the replicas of the pods, which have taken the same steps, do not hold the same weights: memory has changed."""
        for pod, digest in zip(self.pods, digests, strict=True):
            if digest != digests[0]:
                self.is_up = False
                raise SidecarDied(
                    "trainer", "worker", f"the weights of pod {pod.number} have digest {digest} and those of pod {self.pods[0].number} {digests[0]}, after the "
                    "same steps"
                )  # fmt: skip

    def _each(self, do: Callable[[TrainerPod], _T]) -> list[_T]:
        """Calls ``do`` for all pods at once, and raises the first error when all have ended."""
        pods = self.pods or self.own_pods
        with ThreadPoolExecutor(len(pods), thread_name_prefix="trainer-pod") as pool:
            return list(pool.map(do, pods))

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        """The names of the first pod's weight buffers; every pod has two."""
        names = self._each(lambda pod: pod.channel.allocate(size_bytes))
        self.buffers = {pod.number: own for pod, own in zip(self.pods, names, strict=True)}
        return names[0]

    def stop_worker(self) -> None:
        self.is_up = False
        self._each(lambda pod: pod.channel.stop_worker())

    def discard(self) -> None:
        self.is_up = False
        self._each(lambda pod: pod.channel.discard())

    def memory(self) -> dict[str, int]:
        found = self._each(lambda pod: pod.channel.memory())
        return {name: sum(each[name] for each in found) for name in found[0]}

    def close(self) -> None:
        self._each(lambda pod: pod.channel.close())
        if self.joined is not None:
            self.joined.close()
