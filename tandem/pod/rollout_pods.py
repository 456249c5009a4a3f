"""The rollout sidecars of all pods of a run, called as one: the pod's cycle sees one rollout, however many pods draw it. Imports no torch.

Weights are received by every pod without ranks of the trainer before any engine switches to them. The prompts of a rollout are divided over the workers of
all pods (``rollout_workers``). A pod that dies, is silent or misses the deadline of an answer is left out. One of the run's own is killed and started again
before the next update of weights; one that was started elsewhere joins anew (``joining``).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

from tandem.pod.channel import RemoteChannel
from tandem.pod.failures import PodLost, SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.joining import Joining
from tandem.pod.member_watch import MemberWatch
from tandem.pod.rollout_pod import PodWorker, RolloutPod
from tandem.pod.rollout_workers import RolloutWorkers
from tandem.runtime.coordination.membership import Member, leave, members
from tandem.runtime.coordination.store import Store
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, RpcTimeout, WorkerDied
from tandem.runtime.traces.context import in_context
from tandem.types import RunError
from tandem.types.wire import Frame

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_BEGIN_S = 30.0


@dataclass
class RolloutPods:
    """A ``Channel`` to the rollout sidecars of ``pods``, which the run starts itself, and of those that are ``joining`` (``None``: none may).

    ``open_store``: opens the store of the run, which is at ``store_address``. ``capacity``: sequences that a worker draws at once. ``deadline_s``: of a call
    of a shim to its worker; that of a call of a shim is longer, so that the shim names a worker that is stuck. ``there``: the pods that take part;
    ``away``: why the others do not, by number; ``lost``: those that were left out since the last update of weights and outside a rollout, as it is
    reported. ``least``: the pods that an update of weights waits for, up to ``join_timeout_s``. ``sends_on``: where pods send
    on the weights that they have received, as ``serves`` of ``receive_weights``; empty: they do not. ``reads_deltas``: whether pods read element-wise
    deltas. ``weights_url``: the storage that pods of other machines read weights from, if it is given. ``reads_early``: whether a pod that
    receives weights begins while they are registered; ``stages``: whether the engine of a pod that has a version reads and verifies it while other pods
    receive it."""

    pods: Sequence[RolloutPod]
    open_store: Callable[[], Store]
    store_address: str
    capacity: int
    deadline_s: float
    answer_deadline: LearnedDeadline
    joining: Joining | None = None
    least: int = 1
    join_timeout_s: float = 600.0
    sends_on: Mapping[str, Any] = field(default_factory=dict)
    reads_deltas: bool = False
    weights_url: str = ""
    reads_early: Callable[[RolloutPod], bool] = lambda pod: True
    stages: Callable[[RolloutPod], bool] = lambda pod: False
    there: list[RolloutPod] = field(default_factory=list)
    away: dict[int, str] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)
    is_remote: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        # With one worker in each pod every worker is the only reader of its shared memory, and verifies what it reads.
        verify = self._verify if any(pod.workers > 1 for pod in self.pods) else None
        self.workers = RolloutWorkers([], self._replace, self.capacity, self.deadline_s + 10, self._leave_out, self._drop, self.answer_deadline, verify)
        self._store: Store | None = None
        self._watch: MemberWatch | None = None

    def start(self) -> None:
        """Brings up every pod. Raises ``SidecarDied`` if none starts."""
        self._store = self._store or self.open_store()
        if self.joining is not None and self._watch is None:
            self._watch = MemberWatch(self.open_store, self.joining.all_lives)
        joined = [pod for pod in self.there if pod.name]
        self._take_part([*self._each(self.pods, self._start, "start"), *joined])

    def call(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None) -> Frame:
        """One call of all pods. ``receive_early`` does not wait for their answers."""
        if name == "receive_early":
            return Frame({"pods": self._begin_early(list((meta or {})["version"]))}, {}, "result")
        meta, blobs, progress = meta or {}, blobs or {}, on_progress or (lambda _: None)
        early_bytes, told = 0, dict[str, Any]()
        with _one_sidecar():
            if name == "update_weight":
                early_bytes = self._bring_weights(list(meta["version"]))
            # Without those that an earlier rollout under the same weights has lost.
            self._take_part(self.there)
            pods = [worker.pod for worker in self.workers.workers if isinstance(worker, PodWorker)]
            reply, payload = getattr(self.workers, name)(meta, blobs, progress)
            if "groups" in reply:
                reply["groups_of_pods"] = _by_pod(pods, reply.pop("groups"))
            if name == "update_weight":
                (lost, self.lost), news = (self.lost, []), [] if self.joining is None else [*self.joining.told(), *self.joining.nodes.told()]
                told = {key: value for key, value in {"left_out": lost, "members": news, "early_bytes": early_bytes}.items() if value}
        return Frame({**reply, **told}, payload, "result")

    def _begin_early(self, version: list[int]) -> int:
        """Lets pods begin to read ``version`` while it is registered: all that read it from the trainer's pod. Returns how many. What keeps one from it is seen
        when they receive the version; one that does not answer holds up nothing."""
        receivers = [] if self.reads_deltas else [pod for pod in self.there if pod.receives]

        def begin(pod: RolloutPod) -> None:
            with suppress(WorkerDied, SidecarDied, RunError):
                pod.ask("receive_early", self._of_weights(pod, version), deadline_s=_BEGIN_S)

        receivers = [pod for pod in (receivers[:1] if self.sends_on else receivers) if self.reads_early(pod)]
        for pod in receivers:
            Thread(target=begin, args=(pod,), name=f"early-{pod.number}", daemon=True).start()
        return len(receivers)

    def _of_weights(self, pod: RolloutPod, version: list[int]) -> Meta:
        """Returns the arguments of a call by which ``pod`` receives ``version``."""
        url = self.weights_url if pod.name else ""
        stores = {"store": self.store_address, "own_store": pod.own_store, "deltas": self.reads_deltas, "weights_url": url}
        return {**stores, "version": version, "protocols": [], "deadline_s": self.deadline_s}

    def _bring_weights(self, version: list[int]) -> int:
        """Starts the pods again that are not there, takes in those that joined, and lets those without ranks of the trainer receive ``version``. Returns the
        bytes that had come to them before it was published."""
        assert self._store is not None
        present = members(self._store)
        revisions = {member.name: member.revision for member in present}
        parting = list[RolloutPod]()
        for pod in self.there:
            if pod.channel.member not in revisions or (pod.name and revisions[pod.name] != pod.revision):
                parting.append(pod)
        # Each may use up a deadline, and a rack that lost its power is many.
        _at_once(self._part_with, parting)
        self.there = [pod for pod in self.there if pod not in parting]
        self._take_part([*self.there, *self._each([pod for pod in self.pods if pod not in self.there], self._start_again, "start")])
        self._drain(present)
        self._take_in(present)

        early_bytes = list[int]()

        def receive(pod: RolloutPod) -> None:
            if pod.receives:
                reply = pod.ask("receive_weights", {**self._of_weights(pod, version), "serves": self.sends_on}).meta
                early_bytes.append(int(reply.get("early_bytes", 0)))
            if self.stages(pod):
                # It does not switch to it yet.
                with suppress(WorkerDied, RunError):  # It is missed by the update.
                    pod.ask("stage_weight", {"version": version, "worker": 0}, deadline_s=_BEGIN_S)

        received: list[RolloutPod] = []
        for wave in _waves(self.there) if self.sends_on else [self.there]:
            received += self._each(wave, receive, "receive_weights")
        self._take_part(received)
        return sum(early_bytes)

    def _drain(self, present: Sequence[Member]) -> None:
        """Releases the pods on nodes that this run has cordoned, of those without ranks of the trainer, which would be missed. What others cordon takes no new
        pod, as in Kubernetes."""
        if self.joining is None:
            return
        assert self._store is not None
        self.joining.nodes.look(self._store)
        nodes = self.joining.nodes
        held = {member.name: each for member in present if (each := nodes.cordon_of(member)) is not None and each.by == nodes.run}
        for pod in list(self.there):
            if pod.name in held and not pod.trains and isinstance(pod.channel, JoinedChannel):
                with suppress(SidecarDied):
                    pod.channel.release()
                self.joining.forget(pod, "left", f"its node is cordoned: {held[pod.name].reason}")
                self.there = [each for each in self.there if each is not pod]

    def _take_in(self, present: Sequence[Member]) -> None:
        """Takes in the pods that have joined and are prepared. Waits for them where there are fewer than ``least``; raises ``RunError`` past the time."""
        if self.joining is None:
            return
        assert self._store is not None
        ends = monotonic() + self.join_timeout_s
        while True:
            self.joining.look(self._store, present, self.workers.engine)
            self._take_part([*self.there, *self.joining.ready()])
            if len(self.there) >= self.least:
                return
            if monotonic() > ends:
                raise RunError(
                    f"{len(self.there)} of pods.min_count {self.least} pods are there after pods.join_timeout_s ({self.join_timeout_s:g} s); start more with "
                    f"'tandem pod', then resume the run, or resume it with a lower --pods.min_count{self.joining.why_few()}"
                )
            with self.joining.changed:
                self.joining.changed.wait(0.5)
            present = members(self._store)

    def _part_with(self, pod: RolloutPod) -> None:
        """Goes on without a pod that is not a member any more: it leaves, or its lease has ended."""
        if pod.name and self.joining is not None and isinstance(pod.channel, JoinedChannel) and not pod.channel.lost:
            with suppress(SidecarDied):
                if pod.channel.release():
                    self.joining.forget(pod, "left")
                    return
        why = f": {pod.channel.lost}" if isinstance(pod.channel, JoinedChannel) and pod.channel.lost else ""
        self._lose(pod, PodLost(pod.number, "update_weight", f"pod {pod.number} did not renew its lease{why}"))

    def _start(self, pod: RolloutPod) -> None:
        """Starts what does not run of a pod."""
        if not pod.channel.is_running and self._store is not None:
            # The lease of the one before may last on, under the name of the one that takes its place.
            leave(self._store, pod.channel.member)
        pod.channel.start()

    def _start_again(self, pod: RolloutPod) -> None:
        """Starts a pod that was left out, and its engines."""
        self._start(pod)
        for number in range(pod.workers):
            pod.ask("start_engine", {**self.workers.engine, "worker": number})
        logger.warning("pod %d takes part again", pod.number)

    def _each(self, pods: Sequence[RolloutPod], do: Callable[[RolloutPod], None], name: str) -> list[RolloutPod]:
        """Calls ``do`` for all ``pods`` at once. Returns those for which it did not fail; the others are left out."""

        def attempt(pod: RolloutPod) -> RolloutPod | None:
            try:
                do(pod)
            except (WorkerDied, SidecarDied) as death:
                if isinstance(death, SidecarDied) and death.role == "trainer":
                    raise
                self._lose(pod, death if isinstance(death, PodLost) else PodLost(pod.number, name, f"pod {pod.number}: {death}"))
                return None
            return pod

        return [pod for pod in _at_once(attempt, pods) if pod is not None]

    def _take_part(self, pods: Sequence[RolloutPod]) -> None:
        """The pods that take part from now on. Raises ``SidecarDied`` if there are none."""
        self.there = sorted(pods, key=lambda pod: pod.number)
        self.workers.workers = [PodWorker(pod, number) for pod in self.there for number in range(pod.workers)]
        for pod in pods:
            self.away.pop(pod.number, None)
        if not self.there:
            self.lost = []
            raise SidecarDied("rollout", "shim", f"no pod is left: {'; '.join(self.away.values())}")

    def _replace(self, number: int) -> PodWorker:
        worker = self.workers.workers[number]
        assert isinstance(worker, PodWorker)
        worker.pod.ask("replace_worker", {"worker": worker.number})
        return worker

    def _verify(self, version: Sequence[int], revisions: Sequence[int | None]) -> None:
        """Every pod verifies the weights in its shared memory, which its workers have taken."""
        took: dict[int, list[int | None]] = {pod.number: [] for pod in self.there}
        for worker, revision in zip(self.workers.workers, revisions, strict=True):
            assert isinstance(worker, PodWorker)
            took[worker.pod.number].append(revision)
        _at_once(lambda pod: pod.ask("verify_weights", {"version": list(version), "revisions": took[pod.number]}), self.there)

    def _leave_out(self, lost: PodLost) -> None:
        """Ends a pod that was lost in a rollout, which reports it itself."""
        self.answer_deadline.missed()
        self._end(next(pod for pod in self.there if pod.number == lost.pod), lost)

    def _drop(self, lost: PodLost) -> None:
        """Goes on without a pod that joined and is lost in an update of weights: the others have them. Raises ``lost`` for one of the run's own."""
        pod = next(pod for pod in self.there if pod.number == lost.pod)
        if not pod.name:
            raise lost
        self._lose(pod, lost)
        self._take_part(self.there)

    def _lose(self, pod: RolloutPod, lost: PodLost) -> None:
        """Ends a pod that was lost outside a rollout, and notes it unless it was left out before."""
        if pod.name or pod.number not in self.away:
            self.lost.append({"left_out": pod.number, "reason": str(lost), "groups": 0})
        logger.warning("%s; pod %d is left out", lost, pod.number)
        self._end(pod, lost)

    def _end(self, pod: RolloutPod, lost: PodLost) -> None:
        if pod.name and self.joining is not None:
            self.joining.forget(pod, "lost", "" if lost.call == "discard" else str(lost))
        else:
            self.away.setdefault(pod.number, str(lost))
        pod.channel.kill()
        self.there = [each for each in self.there if each is not pod]

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        channel = self.pods[0].channel
        assert isinstance(channel, RemoteChannel)
        return channel.allocate(size_bytes)

    def stop_worker(self) -> None:
        self._take_part(self._each(self.there, lambda pod: pod.channel.stop_worker(), "stop_worker"))

    def discard(self) -> None:
        joined = [pod for pod in self.there if pod.name]
        for pod in joined:
            self._end(pod, PodLost(pod.number, "discard", "the rollout begins anew"))
        _at_once(lambda pod: pod.channel.discard(), self.pods)

    def memory(self) -> dict[str, int]:
        found = [{"rss_bytes": 0, "shm_bytes": 0}]
        for pod in self.there:
            with suppress(SidecarDied):  # It is missed before the next update of weights.
                found.append(pod.channel.memory())
        return {name: sum(each[name] for each in found) for name in found[0]}

    def close(self) -> None:
        joined = [] if self.joining is None else self.joining.all_lives()
        if self._watch is not None:
            self._watch.close()
        _at_once(self._release, [*self.pods, *joined])
        if self._store is not None:
            self._store.close()
        if self.joining is not None:
            self.joining.nodes.close()

    def _release(self, pod: RolloutPod) -> None:
        if isinstance(pod.channel, JoinedChannel) and self.joining is not None and self.joining.goes_on:
            with suppress(SidecarDied):
                pod.channel.release(again=True)
            return
        pod.channel.close()


@contextmanager
def _one_sidecar() -> Iterator[None]:
    """What ends a call of all pods is the death of the one rollout sidecar that the pod's cycle knows."""
    try:
        yield
    except PodLost as lost:
        raise SidecarDied("rollout", "shim", str(lost)) from None
    except (WorkerDied, RpcTimeout) as death:
        raise SidecarDied("rollout", "worker", str(death)) from None


def _waves(pods: Sequence[RolloutPod]) -> Iterator[Sequence[RolloutPod]]:
    """Yields the pods that receive weights at the same time, as many as have them by then and send them on: the trainer's, one more, two more, four more. No
    link carries the weights more than about once a wave; that of the trainer's pod would carry them once for every pod."""
    receivers, count = [pod for pod in pods if pod.receives], 1
    yield [pod for pod in pods if not pod.receives]
    while receivers:
        yield receivers[:count]
        receivers, count = receivers[count:], 2 * count


def _at_once(do: Callable[[RolloutPod], _T], pods: Sequence[RolloutPod]) -> list[_T]:
    with ThreadPoolExecutor(max(1, len(pods)), thread_name_prefix="pod") as pool:
        return list(pool.map(in_context(do), pods))


def _by_pod(pods: Sequence[RolloutPod], groups: Sequence[int]) -> dict[str, int]:
    """Returns the groups that each pod has finished, from those of the workers of ``pods``."""
    counts: dict[str, int] = {}
    for pod, count in zip(pods, groups, strict=True):
        name = pod.name or f"pod-{pod.number}"
        counts[name] = counts.get(name, 0) + count
    return counts
