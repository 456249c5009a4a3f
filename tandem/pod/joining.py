"""The pods that are started elsewhere, as the controller finds them: members of the run that are not its own pods. Imports no torch.

Each new life of one is prepared in a thread of its own, while the run goes on: it is sent the recipe and the small files of the model's folder, and starts
its workers and engines. It then takes part from the next update of weights on. One that is to train is set up before there is a model.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.pod.failures import PodLost, SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.joining_checks import check_joining
from tandem.pod.nodes import Nodes
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.sent_functions import SentFunctions
from tandem.pod.sent_weights import send_weights, weight_files
from tandem.runtime.coordination.membership import Member, find_member, leave
from tandem.runtime.coordination.store import Store
from tandem.runtime.rpc.calls import CallError, WorkerDied
from tandem.runtime.rpc.http_client import HttpClient
from tandem.runtime.rpc.pod_tls import PodTls
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

FOLDER_PROOF = "folder"
"""The file in the run's folder ``pod`` by which a pod shows that it reaches that folder."""
_FAILURES = (SidecarDied, PodLost, WorkerDied, OSError, RunError)
_WEIGHTS = (".safetensors", ".bin", ".pt")
_STACKS_S = 5.0


@dataclass
class Joining:
    """``config``: the recipe for them, in YAML. ``most``: how many may take part at once. ``first``: the number of the first one. ``leadership``: returns
    the revision at which this controller leads. ``deadline_s``: of calls. ``folder``: that of the run, in which ``FOLDER_PROOF`` has the text ``proof``.
    ``functions``: those that episodes run. ``sends_weights``: an update holds an adapter alone, so engines read the other weights from the model's folder.
    ``tls``: the certificates that calls show. ``keeps_checkpoints``: they keep checkpoints of the trainer in memory. ``nodes``: what becomes of the machines
    of the pods. ``target``: the module of the calls of the trainer's ranks in a run without a rollout, whose pods have ranks alone; empty: there is one.
    ``goes_on``: the run begins again after this, with pods that join again.

    ``lives``: of the pods that are prepared or take part, by name; ``numbers``: of all so far, by name; ``news``: what has happened since it was last
    asked for."""

    config: str
    credential: str
    workers: int
    most: int
    first: int
    leadership: Callable[[], int]
    deadline_s: float
    heartbeat_timeout_s: float
    folder: str = ""
    proof: str = ""
    functions: SentFunctions = field(default_factory=SentFunctions)
    sends_weights: bool = False
    tls: PodTls | None = None
    keeps_checkpoints: bool = False
    nodes: Nodes = field(default_factory=Nodes)
    target: str = ""
    goes_on: bool = False
    lives: dict[str, RolloutPod] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    news: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _ready: list[RolloutPod] = field(default_factory=list)
    _over: set[tuple[str, int]] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)
    _why: dict[str, str] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def look(self, store: Store, present: Collection[Member], engine: Mapping[str, Any]) -> None:
        """Begins to prepare those of ``present`` that are new, for ``engine``, the arguments of ``start_engine``."""
        self.nodes.look(store)
        for member in present:
            pod = self._life(store, member)
            if pod is not None and not pod.is_begun:
                pod.is_begun = True
                threading.Thread(target=self._prepare, args=(pod, dict(engine)), name=f"prepare-{member.name}", daemon=True).start()
        self.nodes.note(present, tuple(self.lives))

    def able_to_train(self, store: Store, present: Collection[Member]) -> list[RolloutPod]:
        """Sets up those of ``present`` that are new and may train. Returns the pods that have the run's folder, by number."""
        found = []
        self.nodes.look(store)
        for member in present:
            if not member.facts.get("trains", True):
                continue
            pod = self._life(store, member)
            if pod is None:
                continue
            if self.nodes.cordon_of(member) is not None:
                # Another takes its ranks and its place.
                pod.channel.kill()
                self.forget(pod, "lost")
                continue
            try:
                self._set_up(pod)
            except _FAILURES as error:
                self._refuse(pod, error)
                continue
            # Without engines, it takes part from now on.
            pod.is_begun = pod.is_begun or bool(self.target)
            if pod.reaches_folder:
                found.append(pod)
        self.nodes.note(present, tuple(self.lives))
        return sorted(found, key=lambda pod: pod.number)

    def may_train(self, member: Member) -> bool:
        """Returns whether ``member`` could have ranks of the trainer in the place of another pod."""
        is_pod = "agent" in member.facts and bool(member.facts.get("trains", True))
        return is_pod and (member.name, member.revision) not in self._over and self.nodes.cordon_of(member) is None

    def _life(self, store: Store, member: Member) -> RolloutPod | None:
        """Returns this life of ``member``; ``None`` if it may not take part."""
        if "agent" not in member.facts or (member.name, member.revision) in self._over:
            return None
        before = self.lives.get(member.name)
        if before is not None and before.revision != member.revision:
            self.forget(before, "lost", "it ended, and joined again")
        elif self.nodes.cordon_of(member) is not None and (before is None or not before.is_begun):
            return None
        with self.changed:
            if member.name not in self.lives:
                if len(self.lives) >= self.most:
                    return None
                self.lives[member.name] = self._pod(store, member)
            return self.lives[member.name]

    def ready(self) -> list[RolloutPod]:
        """Returns the pods that are prepared and do not take part yet."""
        with self.changed:
            ready, self._ready = self._ready, []
            return ready

    def told(self) -> list[dict[str, Any]]:
        """Returns the ``news``, once."""
        with self.changed:
            news, self.news = self.news, []
            return news

    def forget(self, pod: RolloutPod, what: str, reason: str = "") -> None:
        """This life of ``pod`` takes part no more: it ``left`` or was ``lost``. The ``reason`` of a loss is counted against its node; without one the run has
        ended it."""
        if what == "lost" and reason:
            self.nodes.failed(pod.name, pod.revision, reason)
        with self.changed:
            self._over.add((pod.name, pod.revision))
            if self.lives.get(pod.name) is pod:
                del self.lives[pod.name]
            if what == "left":
                self.news.append({"left": pod.number, "name": pod.name, "reason": reason})

    def why_few(self) -> str:
        """Returns, for a line about too few pods, which could not join, and which nodes this run does not use; empty: none."""
        with self.changed:
            refused = "".join(f"; pod {name} could not join the run: {why}" for name, why in sorted(self._why.items()))
        return f"{refused}{self.nodes.why_few()}"

    def all_lives(self) -> list[RolloutPod]:
        """Returns the pods that are prepared or take part."""
        with self.changed:
            return list(self.lives.values())

    def stacks(self) -> dict[str, str]:
        """Returns the stacks of the processes of the pods that work for this controller, by their names; of a pod that does not answer, why."""
        with self.changed:
            pods = [pod for pod in self.lives.values() if pod.is_set_up and isinstance(pod.channel, JoinedChannel)]
        with ThreadPoolExecutor(max(1, len(pods)), thread_name_prefix="stacks") as pool:
            taken = pool.map(_stacks_of, pods)
        return {f"{pod.name}, {who}": text for pod, of_pod in zip(pods, taken, strict=True) for who, text in of_pod.items()}

    def _pod(self, store: Store, member: Member) -> RolloutPod:
        number = self.numbers.setdefault(member.name, self.first + len(self.numbers))
        client = HttpClient(
            f"pod {number} ({member.name})", int(member.facts["port"]), self.credential, str(member.facts["host"]), self.heartbeat_timeout_s, self.tls
        )

        def drop() -> None:
            if (now := find_member(store, member.name)) is not None and now.revision == member.revision:
                leave(store, member.name)

        channel = JoinedChannel(member.name, member.revision, [self.leadership(), member.revision], client, self.deadline_s, drop, bool(self.target))
        version = str(member.facts.get("version", "unknown"))
        return RolloutPod(number, channel, self.workers, own_store="its own", name=member.name, revision=member.revision, version=version,
                          is_encrypted=bool(member.facts.get("tls")))  # fmt: skip

    def _set_up(self, pod: RolloutPod) -> None:
        """Makes this controller the one that ``pod`` works for, once."""
        with self._locks.setdefault(pod.name, threading.Lock()):
            if pod.is_set_up:
                return
            if pod.version != __version__:
                raise RunError(f"it has Tandem {pod.version} and the run {__version__}; install the same version")
            if pod.is_encrypted != (self.tls is not None):
                given, missing = ("the run", "it") if self.tls is not None else ("it", "the run")
                raise RunError(f"{given} has pods.tls_cert_file and {missing} has not; give all machines of the run certificates, or none")
            if self.nodes.preflight is not None:
                check_joining(pod, self.nodes.preflight, self.heartbeat_timeout_s)
            meta = {"config": self.config, "number": pod.number, "deadline_s": self.deadline_s, "folder": self.folder, "proof": self.proof}
            meta["functions"], meta["keeps_checkpoints"] = dict(self.functions.paths), self.keeps_checkpoints
            meta["target"] = self.target
            reply = pod.ask("setup", meta, self.functions.files, deadline_s=self.heartbeat_timeout_s).meta
            pod.is_set_up, pod.reaches_folder = True, bool(reply.get("reaches_folder"))

    def _prepare(self, pod: RolloutPod, engine: dict[str, Any]) -> None:
        try:
            self._set_up(pod)
            folder = Path(engine["folder"])
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS)}
            weights = weight_files(folder) if self.sends_weights else {}
            pod.ask("receive_model", {"weights": weights}, files)
            send_weights(pod, folder, weights)
            pod.ask("start_worker")
            for number in range(pod.workers):
                pod.ask("start_engine", {**engine, "worker": number})
        except _FAILURES as error:
            self._refuse(pod, error)
            return
        with self.changed:
            self._ready.append(pod)
            self._why.pop(pod.name, None)
            self.news.append({"joined": pod.number, "name": pod.name})
            self.changed.notify_all()

    def _refuse(self, pod: RolloutPod, error: Exception) -> None:
        """Goes on without a pod that could not be prepared, and says so once."""
        logger.warning("pod %d (%s) could not be prepared: %s", pod.number, pod.name, error)
        pod.channel.kill()
        self.forget(pod, "lost", str(error))
        with self.changed:
            self._why[pod.name] = str(error)
            if str(error) not in self._refused:
                self._refused.add(str(error))
                self.news.append({"refused": pod.number, "name": pod.name, "reason": str(error)})
            self.changed.notify_all()


def _stacks_of(pod: RolloutPod) -> dict[str, str]:
    assert isinstance(pod.channel, JoinedChannel)
    try:
        return pod.channel.stacks(_STACKS_S)
    except (CallError, RunError, UserError) as error:
        # A pod that is stuck is the reason why they are asked for.
        return {"the pod": str(error)}
