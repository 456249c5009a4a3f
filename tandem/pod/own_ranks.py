"""The ranks of a run on data on the machine of its controller, with the calls of a trainer's sidecar: the controller owns them itself. Imports no torch."""

import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tandem.layout.mesh import MeshShape
from tandem.pod.failures import SidecarDied
from tandem.runtime.health.step_times import RankTimes
from tandem.runtime.process.worker_group import GroupForks, GroupSettings, RanksLost, Share, WorkerGroup
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, RpcTimeout, WorkerDied
from tandem.runtime.rpc.listener import listen
from tandem.types.wire import Frame


@dataclass
class OwnRanks:
    """The ranks of ``shape`` on this machine. ``settings``: of any start of them, in whose folder each start has its own. ``lost``: how they were lost last."""

    settings: GroupSettings
    shape: MeshShape
    say: Callable[[str], None]
    forks: GroupForks
    group: WorkerGroup | None = None
    lost: RanksLost | None = None
    _starts: Iterator[int] = field(default_factory=itertools.count)

    def start_shim(self) -> None:
        """Does nothing: their owner is this process."""

    def call(
        self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, *, on_progress: Progress | None = None, deadline_s: float | None = None
    ) -> Frame:
        """One call of the ranks, which may take any time: a hung rank is found by its heartbeat. Raises ``SidecarDied`` where ranks are lost."""
        if name == "start_ranks":
            return Frame({"rendezvous": self._start(meta or {})}, {}, "result")
        assert self.group is not None, "its ranks were started"
        try:
            return self.group.call(name, meta, blobs, deadline_s=float("inf"), on_progress=on_progress)
        except (WorkerDied, RpcTimeout) as death:
            self.lost = death if isinstance(death, RanksLost) else None
            raise SidecarDied("trainer", "worker", str(death)) from None

    def _start(self, meta: Meta) -> str:
        """Starts the ranks, of which the first is rank 0, and returns where those of other machines find them."""
        self.discard()
        host, settings = str(meta["host"]), self.settings
        # The process of rank 0 inherits the socket, so that the others know the port before it has begun.
        with listen(host, 0) as opened:
            rendezvous = f"{host}:{opened.getsockname()[1]}"
            share = Share(tuple(meta["ranks"]), host, rendezvous, opened.fileno())
            folder = settings.folder / str(next(self._starts))
            self.group = WorkerGroup(
                replace(settings, folder=folder, threads=int(meta["threads"]), share=share), self.shape, say=self.say, forks=self.forks
            )
        return rendezvous

    def signal(self, number: signal.Signals) -> None:
        """Sends ``number`` to every rank that runs here."""
        if self.group is not None:
            self.group.signal(number)

    def step_times(self, deadline_s: float) -> list[RankTimes]:
        """Returns where the time of each rank has gone, from shared memory; none where they do not run."""
        group = self.group
        return [] if group is None else group.step_times()

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        raise NotImplementedError("a run on data has no engines that take weights")

    def stop_worker(self) -> None:
        self.discard()

    def discard(self) -> None:
        """Ends the ranks."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def memory(self) -> dict[str, int]:
        """Returns the memory of the ranks, in the fields of ``ProcessMemory``."""
        ranks = [] if self.group is None else self.group.memory()
        return {"rss_bytes": sum(rank.rss_bytes for rank in ranks), "shm_bytes": sum(rank.shm_bytes for rank in ranks)}

    def close(self) -> None:
        self.discard()
