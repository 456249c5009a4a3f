"""The settings of one rank's process, passed as one command-line argument."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How the process of one rank starts.

    Args:
        target: the module that makes this rank's calls.
        directory: the run's directory.
        shape: the mesh's shape.
        rendezvous: the file through which the ranks of this start find each other, or ``HOST:PORT`` of rank 0 where they are on several machines.
        heartbeats: the shared table of heartbeats.
        threads: threads of this process.
        device: ``cpu``, or ``cuda``, where rank r uses GPU r.
        faults, roles: a plan of faults, and the roles that this process has in it.
        log: the name of its log file.
        hang_timeout_s: seconds after which a collective between GPUs that has not ended counts as hung. Of others the supervisor decides.
        here: the ranks of this machine, ascending; empty: all.
        host: the address of this machine that ranks on others connect to.
        listener: in rank 0 of several machines the descriptor of the socket that listens at ``rendezvous``.
    """

    target: str
    directory: str
    rank: int
    shape: dict[str, int]
    rendezvous: str
    heartbeats: str
    threads: int
    device: str
    faults: str
    roles: tuple[str, ...]
    log: str
    hang_timeout_s: float
    here: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    listener: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        return cls(**json.loads(text))
