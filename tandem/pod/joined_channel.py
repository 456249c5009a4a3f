"""How the controller reaches the sidecar of a pod that joined from another machine: calls over HTTP, each with the token of this life of it."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.pod.calls import TRAINER_CALLS
from tandem.pod.failures import SidecarDied
from tandem.pod.watched_call import is_of_worker, watched_call
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.rpc.calls import Blobs, CallError, Meta, Progress, RpcTimeout, WorkerDied
from tandem.runtime.rpc.http_client import HttpClient
from tandem.types import CollectiveError, DamagedWeights, EngineDied, UserError
from tandem.types.wire import Frame

_RELEASE_S = 5.0


@dataclass
class JoinedChannel:
    """The sidecar of the member ``member``, which joined at ``revision``. ``token``: of this life, with the revisions of the controller's leadership and
    of the joining; a life that has another one refuses the call. ``deadline_s`` bounds every call. ``drop``: removes the member from the store. ``lost``:
    why the pod is known to be dead; empty: it is not. ``raises``: what ranks of the trainer say is wrong with the run is raised as it is, with the member."""

    member: str
    revision: int
    token: list[int]
    client: HttpClient
    deadline_s: float
    drop: Callable[[], None] = lambda: None
    raises: bool = False
    is_ended: bool = field(default=False, init=False)
    lost: str = field(default="", init=False)

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None, deadline_s: float | None = None
    ) -> Frame:
        """One call. Raises ``SidecarDied`` for everything that keeps this pod from answering, and ``DamagedWeights`` for weights that must be registered
        again."""
        if self.is_ended:
            why = f": {self.lost}" if self.lost else ""
            raise SidecarDied("rollout", "shim", f"pod '{self.member}' was left out, so it cannot be asked for '{name}'{why}")
        return self._ask(name, meta, blobs, on_progress, self.deadline_s + 10 if deadline_s is None else deadline_s)

    def _ask(self, name: str, meta: Meta | None, blobs: Blobs | None, on_progress: Progress | None, deadline_s: float) -> Frame:
        try:
            meta = {**(meta or {}), "token": self.token}
            return watched_call(self.client, name, meta, blobs, on_progress, deadline_s, learns=deadline_s > self.deadline_s)
        except (WorkerDied, EngineDied) as error:
            raise SidecarDied("rollout", "worker", str(error)) from None
        except DamagedWeights:
            raise
        except (CallError, UserError) as error:
            if self.raises and name in TRAINER_CALLS and isinstance(error, UserError) and not isinstance(error, CollectiveError) and not self.lost:
                raise type(error)(f"on {self.member}: {error}") from None
            is_worker = isinstance(error, RpcTimeout) and is_of_worker(error) and not self.lost
            raise SidecarDied("rollout", "worker" if is_worker else "shim", f"{self.client.peer}: {self.lost}" if self.lost else str(error)) from None

    def ask_alive(self, deadline_s: float) -> None:
        """Asks for a sign of life while other calls are in progress. Raises ``SidecarDied``."""
        self._ask("memory", None, None, None, deadline_s)

    def lose(self, reason: str) -> None:
        """Ends all calls, also those in progress, because the pod is dead."""
        self.lost = reason
        self.kill()
        self.client.abort()

    def stacks(self, deadline_s: float) -> dict[str, str]:
        """Returns the stacks of the processes of this life by their names, while other calls are in progress. Raises as ``CallClient.call``."""
        reply = self.client.call("stacks", {"token": self.token}, deadline_s=deadline_s)
        return {str(who): str(text) for who, text in reply.meta["stacks"].items()}

    def step_times(self, deadline_s: float) -> list[RankTimes]:
        """Returns where the time of each rank of this pod has gone, while other calls are in progress. Raises ``SidecarDied``."""
        return [RankTimes.from_json(each) for each in self._ask("step_times", None, None, None, deadline_s).meta["step_times"]]

    def kill(self) -> None:
        """Leaves this life alone from now on, and lets another begin. A pod that cannot be reached finds out in the store."""
        if not self.is_ended:
            self.is_ended = True
            if self.lost:
                return  # It has no key and answers nothing.
            threading.Thread(target=self._end, name=f"drop-{self.member}", daemon=True).start()

    def _end(self) -> None:
        try:
            self.release(again=True)
        except SidecarDied:
            self.drop()

    def release(self, *, again: bool = False) -> bool:
        """Ends this life; ``again``: another may join. Returns whether the pod was about to leave by itself. Raises ``SidecarDied``."""
        self.is_ended = True
        return bool(self._ask("release", {"again": again}, None, None, _RELEASE_S).meta["left"])

    # It shares no memory with the trainer, so its engines stay as they are when those of the run's own pods end, and its memory is not that of this machine.

    def start(self) -> None:
        """Does nothing: it was started before it joined."""

    def stop_worker(self) -> None:
        """Does nothing: its engines wait for the next weights."""

    def memory(self) -> dict[str, int]:
        return {"rss_bytes": 0, "shm_bytes": 0}

    def discard(self) -> None:
        self.kill()

    def close(self) -> None:
        """Tells the pod that the run needs it no longer."""
        with contextlib.suppress(SidecarDied):
            self.release()

    @property
    def is_running(self) -> bool:
        return not self.is_ended
