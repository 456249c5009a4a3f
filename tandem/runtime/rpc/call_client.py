"""What the clients of a sidecar's calls share, whatever carries the frames: ``rpc_client`` (TCP) and ``http_client`` (HTTP)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.waits import Wait
from tandem.runtime.rpc.calls import Blobs, Meta, PeerDied, Progress, RpcTimeout, is_result
from tandem.runtime.rpc.channel import BrokenFrame
from tandem.types.errors import RunError
from tandem.types.wire import Frame

NO_PROGRESS = "no progress"
"""How the text of an ``RpcTimeout`` begins to say that the sidecar lives and what it does goes on no more."""


@dataclass(frozen=True, slots=True)
class CallClient(ABC):
    """Calls a sidecar, with a connection for each call.

    Args:
        peer: the sidecar's name in error messages.
        heartbeat_timeout_s: the longest time without a frame while a call is in progress. A sidecar sends a heartbeat every second, so
            silence means that its process is stopped or gets no processor time.
    """

    peer: str
    port: int
    credential: str
    host: str = "127.0.0.1"
    heartbeat_timeout_s: float = 30.0

    def call(
        self,
        name: str,
        meta: Meta | None = None,
        blobs: Blobs | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
        wait: Wait | None = None,
    ) -> Frame:
        """Returns the result of the call ``name``. ``wait``: that of the caller for it, which learns from each frame how the sidecar is.

        Raises:
            RpcTimeout: no result within ``deadline_s``, no heartbeat within ``heartbeat_timeout_s``, or no progress until ``wait`` is overdue.
            PeerDied: the sidecar cannot be reached, or closed the connection before it answered.
            UserError, RunError, WorkerDied: as the method raised it.
            RemoteError: the method raised anything else.
        """
        deadline = Deadline(deadline_s)

        def result(receive: Callable[[Deadline], Frame]) -> Frame:
            while True:
                # Each frame has its own time limit from its start, so that a frame that trickles in does not extend it.
                frame = receive(Deadline(self.heartbeat_timeout_s, deadline))
                if wait is not None:
                    wait.heard(frame.meta, is_progress=frame.kind == "progress")
                if is_result(frame, self.peer, name, on_progress):
                    return frame
                if frame.kind == "refused":
                    raise self.refused(name, str(frame.meta.get("message")))
                if deadline.passed or (wait is not None and wait.is_overdue):
                    raise TimeoutError

        try:
            return self._exchange(name, meta or {}, blobs, deadline, min(self.heartbeat_timeout_s, deadline_s), result)
        except TimeoutError:
            limit = f"no sign of life for {self.heartbeat_timeout_s:g} s"
            if deadline.passed:
                limit = f"no result within {deadline_s:g} s"
            elif wait is not None and wait.is_overdue:
                limit = f"{NO_PROGRESS} for {wait.silent_s:.0f} s, after {wait.limit.longest_s:.1f} s at most so far"
            raise RpcTimeout(self.peer, name, f"{self.peer} is stuck in '{name}': {limit}") from None
        except (OSError, EOFError, BrokenFrame) as error:
            raise self.died(name, error) from None

    @abstractmethod
    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, deadline: Deadline, connect_s: float,
        result: Callable[[Callable[[Deadline], Frame]], Frame],
    ) -> Frame:  # fmt: skip
        """Connects within ``connect_s``, sends the call by ``deadline`` and returns ``result(receive)``, where ``receive`` returns the
        next frame of the answer by a deadline or raises ``TimeoutError``."""

    def refused(self, name: str, text: str) -> RunError:
        return RunError(f"{self.peer} refused the call '{name}': {text}")

    def died(self, name: str, error: BaseException) -> PeerDied:
        if isinstance(error, BrokenFrame):
            return PeerDied(self.peer, name, f"{self.peer} answered '{name}' with a broken frame: {error}")
        reason = "the connection ended before the answer" if isinstance(error, EOFError) else str(error) or type(error).__name__
        return PeerDied(self.peer, name, f"{self.peer} did not answer '{name}': {reason}")
