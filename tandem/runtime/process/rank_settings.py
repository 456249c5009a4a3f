"""What the process of one rank is told when it starts, as one command-line argument."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RankSettings:
    """``target``: the module that makes this rank's calls. ``directory``: of the run. ``shape``: of the mesh. ``rendezvous``: the file
    in which the ranks of this start meet. ``heartbeats``: the shared table in which they show what they do. ``stacks``: where this one
    writes its stacks when it is asked. ``threads``: of this process. ``device``: ``cpu``, or ``cuda``, of which rank r takes GPU r.
    ``faults``, ``roles``: a plan of faults, and which of
    its roles this process has. ``log``: the name of its log file. ``hang_timeout_s``: seconds after which a collective that does not end is a hang."""

    target: str
    directory: str
    rank: int
    shape: dict[str, int]
    rendezvous: str
    heartbeats: str
    stacks: str
    threads: int
    device: str
    faults: str
    roles: tuple[str, ...]
    log: str
    hang_timeout_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        return cls(**json.loads(text))
