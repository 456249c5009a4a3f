"""Checkpoints that keepers of several nodes have, as a tier: each node answers for what it has, and all ranks verify and read them together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.find import VerifiedCheckpoint
from tandem.trainer.checkpoint.format.manifest import Damaged
from tandem.trainer.checkpoint.memory.keepers import AT_ONCE, Keepers
from tandem.trainer.checkpoint.memory.source import MemorySource, verified_files
from tandem.trainer.checkpoint.tiers.tier import Opened, TierName


@dataclass
class KeptTier:
    """The checkpoints that ``keepers`` hold. ``folder``: that of the run's checkpoints, for names. ``read_bytes``: that arrived here to be verified, each once
    although it is loaded after that. ``holds``: what is verified stays in memory until it is loaded."""

    keepers: Keepers
    folder: Path
    name: TierName
    holds: bool = True
    read_bytes: int = field(default=0, init=False)
    _held: dict[int, dict[int, set[str]]] = field(default_factory=dict, init=False)

    def steps(self, ranks: Communicator) -> Sequence[int]:
        held = [[step, list(nodes.items())] for step, nodes in sorted(self.keepers.held().items())]
        [held, *_] = gather_values(ranks, held, f"checkpoints in {self.keepers.place}")
        self._held = {int(step): {int(place): set(names) for place, names in places} for step, places in held}
        return sorted(self._held)

    def open(self, ranks: Communicator, step: int, passed_over: Callable[[str], None]) -> Opened | None:
        """As of ``Tier``. A damaged copy of a file is passed over for that of the next node."""
        verified, trouble, passed = None, None, list[str]()
        limit = None if self.holds else 2 * AT_ONCE
        try:
            verified = verified_files(self.keepers, ranks, step, self._held[step], passed, limit)
            self.read_bytes += verified.size_bytes
        except Damaged as error:
            trouble = str(error)
        own = verified and [verified.where, verified.size_bytes]
        every = gather_values(ranks, [trouble, passed, own], f"the checkpoint of step {step} in {self.keepers.place}")
        for reason in [reason for _, reasons, _ in every for reason in reasons]:
            passed_over(f"a copy of the checkpoint of step {step} is passed over: {reason}")
        troubles = [reason for reason, _, _ in every if reason]
        if verified is None or troubles:
            passed_over(f"the checkpoint of step {step} in {self.keepers.place} is skipped: {troubles[0]}")
            return None
        where = {name: int(place) for _, _, (own, _) in every for name, place in own.items()}
        held = (verified.read, verified.verified) if self.holds else ({}, set[tuple[str, int]]())
        source = MemorySource(self.keepers, step, where, *held, limit)
        checkpoint = VerifiedCheckpoint(step, self.folder, verified.digest, verified.manifest)
        named = {name: self.keepers.names[place] for name, place in where.items()}
        return Opened(self.name, checkpoint, sum(size for _, _, (_, size) in every), source, named)
