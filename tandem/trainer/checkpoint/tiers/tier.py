"""Where checkpoints of a run are, from the nearest to the farthest, behind one interface: the memory of nodes, a node's own disk, the run's folder and the
object store. Each has a name for messages, metrics and the journal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.find import VerifiedCheckpoint
from tandem.trainer.checkpoint.read import Source
from tandem.trainer.checkpoint.write import Work

TierName = Literal["memory", "local", "folder", "upload"]
"""The tiers, the nearest first."""


class Opened(NamedTuple):
    """A checkpoint of ``tier`` in which every byte is as written. ``source``: its files where they are in no folder; ``where``: the node of each of them."""

    tier: TierName
    checkpoint: VerifiedCheckpoint
    size_bytes: int
    source: Source | None = None
    where: Mapping[str, str] = {}


class Written(NamedTuple):
    """A checkpoint that was written to ``tier``, in the background. ``where``: the ranks whose files each node keeps. ``trouble``: why it was not; the tier is
    left out from then on."""

    tier: TierName
    step: int
    size_bytes: int = 0
    seconds: float = 0.0
    where: Mapping[str, Sequence[int]] = {}
    trouble: str = ""


class Tier(Protocol):
    """Checkpoints in one place. ``read_bytes``: that this rank has read of them. Every rank calls every method, in the same order."""

    @property
    def name(self) -> TierName: ...

    @property
    def read_bytes(self) -> int: ...

    def steps(self, ranks: Communicator) -> Sequence[int]:
        """Returns the steps of the checkpoints, the same on every rank; whether they are whole is not known yet."""
        ...

    def open(self, ranks: Communicator, step: int, passed_over: Callable[[str], None]) -> Opened | None:
        """Verifies the checkpoint of ``step`` together with the other ranks. Returns ``None`` on all of them if it is damaged or partly written, and calls
        ``passed_over`` with the reason on every rank."""
        ...


class CopyTier(Protocol):
    """A tier to which ranks write checkpoints that are none of the run's folder."""

    @property
    def name(self) -> TierName: ...

    def write(self, ranks: Communicator, mesh: Mapping[str, int], work: Work) -> Written:
        """Commits the checkpoint of ``work`` together with the other ranks. Raises ``RunError`` on all of them if it fails on one."""
        ...


def nearest(
    tiers: Sequence[Tier], ranks: Communicator, at_most: int | None, passed_over: Callable[[str], None], recorded: int | None = None
) -> Opened | None:
    """Returns the newest whole checkpoint, at or before step ``at_most``, of the first of ``tiers`` that has it; ``None`` if there is none. One that is not
    whole is passed over for the same step of the next tier, and then for an older step. ``recorded``: the step up to which the run's folder has rows, which
    a checkpoint of another tier may have outlived."""
    candidates = []
    for place, tier in enumerate(tiers):
        limits = [limit for limit in (at_most, None if tier.name == "folder" else recorded) if limit is not None]
        candidates += [(step, place) for step in tier.steps(ranks) if all(step <= limit for limit in limits)]
    for step, place in sorted(candidates, key=lambda each: (-each[0], each[1])):
        opened = tiers[place].open(ranks, step, passed_over)
        if opened is not None:
            return opened
    return None
