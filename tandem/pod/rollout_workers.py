"""The rollout workers of a sidecar, called together: weights go to all of them, and the prompts of a rollout are divided over them.

A worker that dies during a rollout is replaced, and only its unfinished groups are drawn again. Their tokens are the same, because random numbers
depend on the request and not on the worker. The workers are those of one sidecar, in its shim, or those of all pods, in the controller
(``rollout_pods``): then one that is lost with its pod is left out. Imports no torch.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from tandem.pod.failures import PodLost
from tandem.rl.rollout.dispatcher import Dispatcher, GroupLoad
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, RpcTimeout, WorkerDied
from tandem.runtime.traces.context import in_context
from tandem.types import DamagedWeights, Prompt, RunError, Sample
from tandem.types.wire import Buffer, Frame
from tandem.types.wire_records import decode_prompts, decode_samples, encode_prompts, encode_samples

logger = logging.getLogger(__name__)


class CallsWorker(Protocol):
    """One worker, as ``WorkerGroup`` calls it."""

    def call(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, deadline_s: float, on_progress: Progress | None = None) -> Frame:
        """Returns the result of a call. Raises ``WorkerDied`` or ``RpcTimeout`` if the worker died."""
        ...


@dataclass
class RolloutWorkers:
    """``workers``: by number. ``replace(number)`` starts another worker in the place of a dead one, and raises ``PodLost`` where it cannot.
    ``verify(version, revisions)``: compares all of it with its digests, once for each shared memory that workers take it from, where it must still be what
    they took, which is of these ``revisions`` by worker (``None``: it took nothing); it raises ``DamagedWeights``. Without it every worker verifies a copy of
    its own. ``leave_out``: ends what is left of a lost pod. ``drop``: removes from ``workers`` those of a pod that is lost in an update of weights, and raises
    what ends the update if it cannot go on without them. ``capacity``: sequences that a worker draws at once.
    ``answer_deadline``: of a worker's next finished group, ``deadline_s`` if there is none."""

    workers: list[CallsWorker]
    replace: Callable[[int], CallsWorker]
    capacity: int
    deadline_s: float
    leave_out: Callable[[PodLost], None] = lambda lost: None
    drop: Callable[[PodLost], None] | None = None
    answer_deadline: LearnedDeadline | None = None
    verify: Callable[[Sequence[int], Sequence[int | None]], object] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    version: tuple[int, ...] = ()

    def start_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Starts the engine of every worker. The reply has the ``kv_cache_bytes`` and ``base_bytes`` of all."""
        self.engine, replies = dict(meta), self._all("start_engine", meta)
        return {name: _sum(name, replies) for name in ("kv_cache_bytes", "base_bytes")}, {}

    def sleep_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Frees the weights and the KV cache of every worker's engine until the next ``update_weight``."""
        return {"left_bytes": _sum("left_bytes", self._all("sleep_engine", meta))}, {}

    def weight_digests(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The ``digests`` of what every worker's engine holds, by worker and rank."""
        return {"digests": [ranks for reply in self._all("weight_digests", meta) for ranks in reply.meta["digests"]]}, {}

    def verify_engine(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Compares what every worker's engine holds with what it was given. Raises ``EngineDied`` if a tensor has changed."""
        self._all("verify_engine", meta)
        return {}, {}

    def update_weight(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Updates every worker to the published ``version``. ``rereads``: those of all workers. Raises ``RunError`` if a worker holds another version
        afterwards, ``DamagedWeights`` if the weights that all have taken do not have their digests; no worker says that it holds them then."""
        version = tuple(meta["version"])
        if self.verify is None or len(self.workers) == 1:
            replies = held = self._all("update_weight", meta, self.drop)
        else:
            replies = self._all("update_weight", {**meta, "unverified": True}, self.drop)
            self.verify(version, [reply.meta["revision"] for reply in replies])
            held = self._all("confirm_weight", {"version": list(version)}, self.drop)
        for number, reply in enumerate(held):
            if tuple(reply.meta["version"]) != version:
                raise RunError(f"rollout worker {number} holds the weights {tuple(reply.meta['version'])} after the update to {version}")
        self.version = version
        return {
            "version": list(version), "rereads": [name for reply in replies for name in reply.meta["rereads"]],
            "kv_cache_bytes": _sum("kv_cache_bytes", replies), "base_bytes": _sum("base_bytes", replies),
            "seconds": max(float(reply.meta["seconds"]) for reply in replies),
        }, {}  # fmt: skip

    def rollout(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Samples of the prompts, in one blob for each answer of a worker. ``expected``: tokens of the longest sample of each prompt. ``restarts_left``:
        how many workers may be replaced; each replacement is reported as progress. The reply has the ``busy_share`` of the workers' time, the ``drafts``
        of all, and the ``groups`` that each worker has finished."""
        prompts, unfinished = decode_prompts(blobs["prompts"]), defaultdict[str, list[Sample]](list)
        for sample in decode_samples(blobs["unfinished"]):
            unfinished[sample.prompt_id].append(sample)
        counts = [len(unfinished[prompt.id]) or int(meta["settings"]["n"]) for prompt in prompts]
        loads = [GroupLoad(count, longest, count * longest) for count, longest in zip(counts, meta["expected"], strict=True)]
        drawn = _Rollout(self, prompts, unfinished, Dispatcher(loads, len(self.workers), self.capacity), dict(meta), progress)
        return drawn.run()

    def prepare(self, number: int) -> None:
        """Gives a worker that was just started the engine and the weights of the others."""
        worker = self.workers[number]
        worker.call("start_engine", self.engine, deadline_s=self.deadline_s)
        try:
            worker.call("update_weight", {"version": list(self.version)}, deadline_s=self.deadline_s)
        except DamagedWeights as damage:
            raise WorkerDied(f"rollout worker {number}", "update_weight", f"it was replaced and cannot read the weights again: {damage}") from None

    def _all(self, name: str, meta: Meta, drop: Callable[[PodLost], None] | None = None) -> list[Frame]:
        """Calls ``name`` on every worker at once. Raises the first error when all have answered; with ``drop`` the workers of lost pods are left out."""
        with ThreadPoolExecutor(len(self.workers), thread_name_prefix=name) as pool:
            calls = {
                number: pool.submit(in_context(worker.call), name, meta, deadline_s=self.deadline_s) for number, worker in enumerate(self.workers)
            }
        asked, replies, lost = self.workers, dict[int, Frame](), dict[int, PodLost]()
        for number, call in calls.items():
            try:
                replies[number] = call.result()
            except PodLost as death:
                if drop is None:
                    raise
                lost.setdefault(death.pod, death)
        if drop is None or not lost:
            return [*replies.values()]
        for pod_lost in lost.values():
            drop(pod_lost)
        # Another worker of a lost pod may have answered before.
        return [reply for number, reply in replies.items() if asked[number] in self.workers]


def _sum(name: str, replies: Sequence[Frame]) -> int:
    return sum(int(reply.meta[name]) for reply in replies)


class _Rollout:
    """One rollout: a thread for each worker hands it groups and waits for those that it has finished. The lock guards everything but the calls."""

    def __init__(
        self, owner: RolloutWorkers, prompts: Sequence[Prompt], unfinished: Mapping[str, Sequence[Sample]], dispatcher: Dispatcher, meta: dict[str, Any],
        progress: Progress,
    ) -> None:
        self._owner, self._prompts, self._unfinished, self._dispatcher, self._progress = owner, prompts, unfinished, dispatcher, progress
        self._restarts_left = int(meta.pop("restarts_left"))
        del meta["expected"]
        self._meta = meta
        self._changed = threading.Condition()
        self._place = {prompt.id: place for place, prompt in enumerate(prompts)}
        self._samples: list[Buffer] = []
        self._done = 0
        self._busy_s = [0.0] * len(owner.workers)
        self._groups = [0] * len(owner.workers)
        self._drafts = [0, 0, 0]
        self._left_out = set[int]()
        self._lost_pods = set[int]()
        self._error: BaseException | None = None

    def run(self) -> Reply:
        began, count = monotonic(), len(self._owner.workers)
        with ThreadPoolExecutor(count, thread_name_prefix="rollout") as pool:
            list(pool.map(in_context(self._drive), range(count)))
        if self._error is not None:
            raise self._error
        share = sum(self._busy_s) / (count * max(monotonic() - began, 1e-9))
        return {"busy_share": share, "drafts": self._drafts, "groups": self._groups}, {f"samples-{i}": blob for i, blob in enumerate(self._samples)}

    def _drive(self, number: int) -> None:
        """Keeps worker ``number`` busy until every group is finished."""
        is_first = True
        try:
            while (new := self._next(number)) is not None:
                try:
                    self._draw(number, new, is_first)
                    is_first = False
                except (WorkerDied, RpcTimeout) as death:
                    if not self._replace(number, death):
                        return
                    is_first = True
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self, number: int) -> list[Prompt] | None:
        """Waits until ``number`` has something to draw, and returns the prompts that it is to add; ``None``: the rollout has ended."""
        with self._changed:
            while self._error is None and not self._dispatcher.holds(number) and not self._dispatcher.is_done:
                self._changed.wait()
            if self._error is not None or self._dispatcher.is_done:
                return None
            return [self._prompts[group] for group in self._dispatcher.take(number)]

    def _draw(self, number: int, new: Sequence[Prompt], is_first: bool) -> None:
        began, worker = monotonic(), self._owner.workers[number]
        meta = {**self._meta, "adds": not is_first, "wait": "any"}
        rest = [sample for prompt in new for sample in self._unfinished[prompt.id]]
        blobs = {"prompts": encode_prompts(new), "unfinished": encode_samples(rest)}
        answer = self._owner.answer_deadline
        deadline_s = self._owner.deadline_s if answer is None else answer()
        frame = worker.call("rollout", meta, blobs, deadline_s=deadline_s, on_progress=self._pass_on)
        with self._changed:
            took = monotonic() - began
            self._busy_s[number] += took
            if answer is not None:
                answer.answered(took)
            self._samples.append(frame.blobs["samples"])
            self._drafts = [total + own for total, own in zip(self._drafts, frame.meta["drafts"], strict=True)]
            for name in frame.meta["finished"]:
                self._dispatcher.finish(number, self._place[name])
            self._done += len(frame.meta["finished"])
            self._groups[number] += len(frame.meta["finished"])
            self._progress({"done": self._done, "total": len(self._prompts)})
            self._changed.notify_all()

    def _pass_on(self, progress: dict[str, Any]) -> None:
        """Passes on the samples that a worker streams; its number of groups is not that of the rollout."""
        if "samples" in progress:
            with self._changed:
                self._progress(progress)

    def _replace(self, number: int, death: WorkerDied | RpcTimeout) -> bool:
        """Gives the groups of a dead worker to the others, and replaces it. Returns whether it is there again; it is not if its whole pod was lost."""
        began = monotonic()
        with self._changed:
            lost = self._dispatcher.lose(number)
            if isinstance(death, PodLost):
                self._leave_out(number, death, len(lost))
                return False
            self._spend_restart(death)
            self._changed.notify_all()
        logger.warning("%s; rollout worker %d is replaced and %d groups are drawn again", death, number, len(lost))
        try:
            self._owner.workers[number] = self._owner.replace(number)
            self._owner.prepare(number)
        except PodLost as pod_lost:
            with self._changed:
                self._restarts_left += 1  # Both are one restart.
                self._leave_out(number, pod_lost, len(lost))
            return False
        with self._changed:
            self._dispatcher.rejoin(number)
            self._progress({"replaced": number, "reason": str(death), "groups": len(lost), "seconds": round(monotonic() - began, 3)})
            self._changed.notify_all()
        return True

    def _leave_out(self, number: int, death: PodLost, groups: int) -> None:
        """Goes on without a worker of a lost pod, which is ended before others draw its ``groups``. Called with the lock. Raises ``death`` if it was the last
        worker."""
        if death.pod not in self._lost_pods:
            self._spend_restart(death)
            self._lost_pods.add(death.pod)
            logger.warning("%s; pod %d is left out of this rollout", death, death.pod)
            self._owner.leave_out(death)
            self._progress({"left_out": death.pod, "reason": str(death), "groups": groups})
        self._left_out.add(number)
        if len(self._left_out) == len(self._owner.workers):
            raise death
        self._changed.notify_all()

    def _spend_restart(self, death: WorkerDied | RpcTimeout) -> None:
        if self._restarts_left <= 0:
            raise death
        self._restarts_left -= 1
