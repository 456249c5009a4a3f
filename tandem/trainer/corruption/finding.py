"""What the check found when two ranks computed different bits. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tandem.types import RunError


@dataclass(frozen=True, slots=True)
class CorruptionFinding:
    """Ranks that computed other bits than the rest in ``step``.

    Args:
        micro_batch: the number of the micro-batch, and ``owner`` the rank that trains on it.
        ranks: those that are wrong, ascending; ``hosts``: the machine of each.
        tensor: the first tensor that differs: ``loss``, or a parameter, whose gradient differs.
        is_persistent: whether one of them was wrong again when the computation was repeated.
        is_undecided: whether the votes do not say which of ``ranks`` is wrong.
    """

    step: int
    micro_batch: int
    owner: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    tensor: str
    is_persistent: bool
    is_undecided: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "CorruptionFinding":
        return cls(**{**content, "ranks": tuple(content["ranks"]), "hosts": tuple(content["hosts"])})

    def on(self, nodes: Mapping[str, str]) -> "CorruptionFinding":
        """Returns it with the names that the cluster manager has for the machines: ``nodes`` by rank, as text; of others the hosts stay."""
        return replace(self, hosts=tuple(nodes.get(str(rank), host) for rank, host in zip(self.ranks, self.hosts, strict=True)))

    def describe(self) -> str:
        """Returns one line: who is wrong, and what differs."""
        who = " or ".join(f"rank {rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True))
        if not self.is_undecided:
            who = who.replace(" or ", " and ")
        what = "the loss" if self.tensor == "loss" else f"the gradient of {self.tensor}"
        repeated = "was wrong again when it was repeated" if self.is_persistent else "was right when it was repeated"
        if self.is_undecided:
            repeated = "differs again when it is repeated, and there is no third replica to decide"
        return f"silent data corruption in step {self.step}: {who} computed other bits of micro-batch {self.micro_batch} ({what}); the computation {repeated}"


class SilentCorruption(RunError):
    """The check found wrong bits; raised on every rank before the optimizer's step."""

    def __init__(self, finding: CorruptionFinding) -> None:
        super().__init__(finding.describe())
        self.finding = finding
