"""The pods that are started elsewhere, as the controller finds them: members of the run that are not its own pods. Imports no torch.

Each new life of one is prepared in a thread of its own, while the run goes on: it is sent the recipe and the small files of the model's folder, and starts
its workers and engines. It then takes part from the next update of weights on.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.pod.failures import PodLost, SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.rollout_pod import RolloutPod
from tandem.runtime.coordination.membership import Member, leave, members
from tandem.runtime.coordination.store import Store
from tandem.runtime.rpc.calls import WorkerDied
from tandem.runtime.rpc.http_client import HttpClient
from tandem.types import RunError

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".safetensors.index.json")


@dataclass
class Joining:
    """``config``: the recipe for them, in YAML. ``most``: how many may take part at once. ``first``: the number of the first one. ``leadership``: returns
    the revision at which this controller leads. ``deadline_s``: of calls.

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
    lives: dict[str, RolloutPod] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    news: list[dict[str, Any]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _ready: list[RolloutPod] = field(default_factory=list)
    _over: set[tuple[str, int]] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)

    def look(self, store: Store, present: Collection[Member], engine: Mapping[str, Any]) -> None:
        """Begins to prepare those of ``present`` that are new, for ``engine``, the arguments of ``start_engine``."""
        for member in present:
            if "agent" not in member.facts or (member.name, member.revision) in self._over:
                continue
            with self.changed:
                # A life before this one is seen to be over when it is next asked.
                if member.name in self.lives or len(self.lives) >= self.most:
                    continue
                pod = self.lives[member.name] = self._pod(store, member)
            threading.Thread(target=self._prepare, args=(pod, dict(engine)), name=f"prepare-{member.name}", daemon=True).start()

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
        """This life of ``pod`` takes part no more: it ``left`` or was ``lost``."""
        with self.changed:
            self._over.add((pod.name, pod.revision))
            if self.lives.get(pod.name) is pod:
                del self.lives[pod.name]
            if what == "left":
                self.news.append({"left": pod.number, "name": pod.name, "reason": reason})

    def _pod(self, store: Store, member: Member) -> RolloutPod:
        number = self.numbers.setdefault(member.name, self.first + len(self.numbers))
        client = HttpClient(
            f"pod {number} ({member.name})", int(member.facts["port"]), self.credential, str(member.facts["host"]), self.heartbeat_timeout_s
        )

        def drop() -> None:
            if any(each.name == member.name and each.revision == member.revision for each in members(store)):
                leave(store, member.name)

        channel = JoinedChannel(member.name, member.revision, [self.leadership(), member.revision], client, self.deadline_s, drop)
        version = str(member.facts.get("version", "unknown"))
        return RolloutPod(number, channel, self.workers, own_store="its own", name=member.name, revision=member.revision, version=version)

    def _prepare(self, pod: RolloutPod, engine: dict[str, Any]) -> None:
        try:
            if pod.version != __version__:
                raise RunError(f"it has Tandem {pod.version} and the run {__version__}; install the same version")
            folder = Path(engine["folder"])
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS)}
            pod.ask("setup", {"config": self.config, "number": pod.number, "deadline_s": self.deadline_s}, files, deadline_s=self.heartbeat_timeout_s)
            pod.ask("start_worker")
            for number in range(pod.workers):
                pod.ask("start_engine", {**engine, "worker": number})
        except (SidecarDied, PodLost, WorkerDied, OSError, RunError) as error:
            logger.warning("pod %d (%s) could not be prepared: %s", pod.number, pod.name, error)
            pod.channel.kill()
            self.forget(pod, "lost")
            with self.changed:
                if str(error) not in self._refused:
                    self._refused.add(str(error))
                    self.news.append({"refused": pod.number, "name": pod.name, "reason": str(error)})
                self.changed.notify_all()
            return
        with self.changed:
            self._ready.append(pod)
            self.news.append({"joined": pod.number, "name": pod.name})
            self.changed.notify_all()
