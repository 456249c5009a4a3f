"""How a sidecar fails, as the pod sees it."""

from typing import Literal

from tandem.runtime.rpc.calls import WorkerDied

Role = Literal["trainer", "rollout"]


class SidecarDied(Exception):
    """A sidecar's shim or worker ended, or gave no sign of life for too long. The pod can replace it.

    ``role`` names the sidecar, ``part`` what ended (``shim`` or ``worker``), ``reason`` one line for the log.
    """

    def __init__(self, role: Role, part: Literal["shim", "worker"], reason: str) -> None:
        super().__init__(f"{role} {part} died: {reason}")
        self.role, self.part, self.reason = role, part, reason


class PodLost(WorkerDied):
    """The rollout sidecar of pod ``pod`` ended, or did not answer in time: none of its workers draws any more."""

    def __init__(self, pod: int, call: str, reason: str) -> None:
        super().__init__(f"pod {pod}", call, reason)
        self.pod = pod
