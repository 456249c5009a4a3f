"""How the controller reaches a sidecar: through its shim, or inside its own process for a debugger.

The two kinds answer the same calls with the same values; everything above this file is the same code for both.
"""

import contextlib
import gc
import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from tandem.pod.calls import MEASURED_CALLS
from tandem.pod.failures import Role, SidecarDied
from tandem.pod.pod_forks import PodForks
from tandem.pod.watched_call import is_of_worker, watched_call
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.processes import Threads, describe_exit, kill, memory_of, spawn, terminate
from tandem.runtime.rpc.calls import Blobs, Meta, Method, PeerDied, Progress, RemoteError, RpcTimeout, WorkerDied
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.types import DamagedOffload, EngineDied, RunError
from tandem.types.wire import Frame
from tandem.weight_transfer.shared_memory import WeightBuffers

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
TRAINER_SEGMENTS = "trainer"
"""How a reader of shared memory names the peer that owned it."""


class Channel(Protocol):
    """A sidecar's life and its calls. Everything but ``close`` and ``discard`` raises ``SidecarDied`` where the sidecar is
    gone or gives no sign of life."""

    @property
    def is_remote(self) -> bool:
        """Whether the worker has processes of its own, so that a call can last while others are made of another sidecar."""
        ...

    def start(self) -> None:
        """Bring up what is not running: the shim, then its worker."""
        ...

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None
    ) -> Frame:
        """One call of the worker."""
        ...

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        """The names of two weight buffers of ``size_bytes`` each, which live as long as the shim."""
        ...

    def stop_worker(self) -> None:
        """End the worker's process; the shim, and what it owns, stays."""
        ...

    def discard(self) -> None:
        """Clear away what is left after a death, so that ``start`` begins anew."""
        ...

    def memory(self) -> dict[str, int]:
        """The fields of ``ProcessMemory``, summed over the worker's processes; after a measured call, at its end."""
        ...

    def close(self) -> None:
        """End worker and shim."""
        ...


@dataclass
class RemoteChannel:
    """A shim in a process of its own. ``deadline_s`` bounds every call, and the learned deadline of a call without progress is at least
    ``least_deadline_s``. ``number``: of its pod. ``join``: the address of the store in which it becomes a
    member of the run, on a lease of ``lease_s``; empty: it does not. ``trainer_pod``: the id of the pod that it receives weights from. ``tls``: as of
    ``tls_arguments``. ``forks``: of the pod's sidecars, if they share a fork server; it ends with the channel of the trainer."""

    role: Role
    directory: Path
    pod_id: str
    credential_file: Path
    credential: str
    deadline_s: float
    threads: int
    faults: FaultPlan | None = None
    number: int = 0
    join: str = ""
    lease_s: float = 15.0
    trainer_pod: str = ""
    least_deadline_s: float = 0.0
    tls: Sequence[str] = ()
    forks: PodForks | None = None
    shim: "subprocess.Popen[bytes] | None" = None
    client: RpcClient | None = None
    starts: int = 0
    is_remote: bool = field(default=True, init=False)
    told_memory: dict[str, int] | None = field(default=None, init=False)
    """What the newest reply has said of the worker's memory, until it is asked for."""

    @property
    def member(self) -> str:
        """Its name among the members of the run."""
        return f"pod-{self.number}"

    @property
    def is_running(self) -> bool:
        """Whether there is a shim, as far as this process knows."""
        return self.shim is not None

    def start(self) -> None:
        self.start_shim()
        self._ask("start_worker", deadline_s=START_DEADLINE_S)

    def start_shim(self) -> None:
        """Brings up the shim if it does not run, and no worker."""
        if self.client is not None:
            return
        self.starts += 1
        port_file = self.directory / "pod" / f"{self.role}-{self.starts}.port"
        port_file.unlink(missing_ok=True)
        arguments = [
            "--role", self.role, "--run", str(self.directory), "--pod-id", self.pod_id, "--credential", str(self.credential_file),
            "--port-file", str(port_file), "--threads", str(self.threads), "--deadline", str(self.deadline_s),
            "--lease", str(self.lease_s),
        ]
        if self.number:
            arguments += ["--pod-number", str(self.number)]
        if self.join:
            arguments += ["--join", self.join, "--member", self.member]
        arguments += self.tls
        if self.faults is not None:
            arguments += ["--faults", str(self.faults)]
        output, passed = self.directory / "logs" / f"{self.role}_shim.out", list[int]()
        with contextlib.ExitStack() as stack:
            if self.forks is not None:
                passed = [stack.enter_context(self.forks.connect()).fileno()]
                arguments += ["--forks", str(passed[0])]
            self.shim = spawn("tandem.pod.shim", arguments, threads=Threads(1), new_session=True, output=output, pass_fds=passed)
        port = _wait_for_port(port_file, self.shim)
        if port is None:
            status = describe_exit(kill(self.shim))
            log = (self.directory / "logs" / f"{self.role}_shim.out") if self.number else f"logs/{self.role}_shim.out"
            raise SidecarDied(self.role, "shim", f"it did not start ({status}); see {log}")
        self.client = RpcClient(f"the {self.role} sidecar" + (f" of pod {self.number}" if self.number else ""), port, self.credential)

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None, deadline_s: float | None = None
    ) -> Frame:
        """As ``Channel.call``. ``deadline_s``: a shorter one for this call."""
        frame = self._ask(name, meta, blobs, deadline_s=self.deadline_s + 10 if deadline_s is None else deadline_s, on_progress=on_progress)
        self.told_memory = frame.meta.pop("memory", None) if name in MEASURED_CALLS else None
        return frame

    def _ask(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, deadline_s: float, on_progress: Progress | None = None
    ) -> Frame:
        if self.client is None:
            raise SidecarDied(self.role, "shim", f"it is not running, so it cannot be asked for '{name}'")
        learns = deadline_s > self.deadline_s
        try:
            return watched_call(self.client, name, meta, blobs, on_progress, deadline_s, learns=learns, least_s=self.least_deadline_s)
        except (WorkerDied, EngineDied, DamagedOffload) as error:
            raise SidecarDied(self.role, "worker", str(error)) from None
        except (PeerDied, RpcTimeout) as error:
            if error.peer in (TRAINER_SEGMENTS, self.trainer_pod):
                raise SidecarDied("trainer", "shim", str(error)) from None
            part = "worker" if isinstance(error, RpcTimeout) and is_of_worker(error) else "shim"
            raise SidecarDied(self.role, part, str(error)) from None  # type: ignore[arg-type]
        except RemoteError as error:
            raise RunError(f"{error}; this is a defect, please report it with logs/{self.role}_worker.log") from None

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        return tuple(self._ask("allocate", {"bytes": size_bytes}, deadline_s=START_DEADLINE_S).meta["names"])

    def stop_worker(self) -> None:
        self._ask("stop_worker", deadline_s=60)

    def memory(self) -> dict[str, int]:
        told, self.told_memory = self.told_memory, None
        return {name: int(value) for name, value in (told or self._ask("memory", deadline_s=30).meta).items()}

    def discard(self) -> None:
        if self.shim is not None and self.shim.poll() is None and self.client is not None:
            try:
                self._ask("stop_worker", deadline_s=30)
                return
            except SidecarDied:
                logger.warning("the %s shim does not answer; it is killed", self.role)
        self.kill()

    def kill(self) -> None:
        """Ends the shim, and with it its workers, at once."""
        shim, self.shim, self.client = self.shim, None, None
        if shim is not None:
            kill(shim)

    def close(self) -> None:
        if self.shim is not None:
            terminate(self.shim, grace_s=10)
        self.shim = self.client = None
        if self.forks is not None and self.role == "trainer":
            self.forks.close()


def _wait_for_port(port_file: Path, process: "subprocess.Popen[bytes]") -> int | None:
    """The port that a starting shim writes down, or ``None`` where its process ends first."""
    deadline = Deadline(START_DEADLINE_S)
    while not deadline.passed:
        if port_file.exists():
            return int(port_file.read_text(encoding="ascii"))
        if process.poll() is not None:
            return None
        time.sleep(0.01)
    return None


@dataclass
class InlineChannel:
    """The worker inside this process. ``make`` builds it and returns its calls."""

    role: Role
    pod_id: str
    make: Callable[[], Mapping[str, Method]]
    methods: Mapping[str, Method] = field(default_factory=dict)
    buffers: WeightBuffers | None = None
    is_remote: bool = field(default=False, init=False)

    def start(self) -> None:
        if not self.methods:
            self.methods = self.make()

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None
    ) -> Frame:
        if name not in self.methods:
            raise RunError(f"the inline {self.role} sidecar has no call '{name}' (is it started?)")
        reply, payload = self.methods[name](meta or {}, blobs or {}, on_progress or (lambda _: None))
        return Frame(reply, payload, "result")

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        if self.buffers is None:
            self.buffers = WeightBuffers.create(self.pod_id, size_bytes)
        return self.buffers.names

    def stop_worker(self) -> None:
        self.methods = {}
        gc.collect()

    def memory(self) -> dict[str, int]:
        return asdict(memory_of(os.getpid()))

    def discard(self) -> None:
        self.stop_worker()

    def close(self) -> None:
        self.stop_worker()
        if self.buffers is not None:
            self.buffers.close()
