"""Checkpoints in the memory of nodes as a tier: written with votes of all ranks as ``checkpoint.write`` has them, verified and read by all together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from tandem.runtime.collectives.agreement import gather_values, vote
from tandem.runtime.collectives.communicator import Communicator
from tandem.storage.digests import CHUNK_BYTES, best_algorithm, bytes_digest, chunk_digest
from tandem.trainer.checkpoint.find import VerifiedCheckpoint
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Damaged, Entry, Manifest, data_name, index_name, marker_of
from tandem.trainer.checkpoint.format.rank_file import RankIndex
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.memory.source import MemorySource, verified_files
from tandem.trainer.checkpoint.tiers.tier import Opened, TierName, Written
from tandem.trainer.checkpoint.write import Work
from tandem.types import RunError


@dataclass
class MemoryTier:
    """The checkpoints that ``keepers`` hold. ``folder``: that of the run's checkpoints, for names. ``read_bytes``: that arrived here to be verified, each once
    although it is loaded after that."""

    keepers: Keepers
    folder: Path
    name: TierName = field(default="memory", init=False)
    read_bytes: int = field(default=0, init=False)
    _held: dict[int, dict[int, set[str]]] = field(default_factory=dict, init=False)

    def steps(self, ranks: Communicator) -> Sequence[int]:
        held = [[step, list(nodes.items())] for step, nodes in sorted(self.keepers.held().items())]
        [held, *_] = gather_values(ranks, held, "checkpoints in memory")
        self._held = {int(step): {int(place): set(names) for place, names in places} for step, places in held}
        return sorted(self._held)

    def open(self, ranks: Communicator, step: int, passed_over: Callable[[str], None]) -> Opened | None:
        """As of ``Tier``. A damaged copy of a file is passed over for that of the next node."""
        verified, trouble, passed = None, None, list[str]()
        try:
            verified = verified_files(self.keepers, ranks, step, self._held[step], passed)
            self.read_bytes += verified.size_bytes
        except Damaged as error:
            trouble = str(error)
        own = verified and [verified.where, verified.size_bytes]
        every = gather_values(ranks, [trouble, passed, own], f"the checkpoint of step {step} in memory")
        for reason in [reason for _, reasons, _ in every for reason in reasons]:
            passed_over(f"a copy of the checkpoint of step {step} is passed over: {reason}")
        troubles = [reason for reason, _, _ in every if reason]
        if verified is None or troubles:
            passed_over(f"the checkpoint of step {step} in memory is skipped: {troubles[0]}")
            return None
        where = {name: int(place) for _, _, (own, _) in every for name, place in own.items()}
        source = MemorySource(self.keepers, step, where, verified.read, verified.verified)
        checkpoint = VerifiedCheckpoint(step, self.folder, verified.digest, verified.manifest)
        named = {name: self.keepers.names[place] for name, place in where.items()}
        return Opened(self.name, checkpoint, sum(size for _, _, (_, size) in every), source, named)

    def write(self, ranks: Communicator, mesh: Mapping[str, int], work: Work) -> Written:
        """As of ``CopyTier``: raises ``RunError`` if some rank's file has no place."""
        began, trouble, entry = perf_counter(), None, None
        content, algorithm = work.staged.content, best_algorithm()
        digest, name, stored = chunk_digest(algorithm), data_name(ranks.rank), list[int]()
        chunks = tuple(digest(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES))
        index = RankIndex(ranks.rank, name, work.staged.layout.size, CHUNK_BYTES, algorithm, chunks, work.staged.layout.placed, work.own).to_json()
        try:
            stored = self.keepers.put(work.step, {name: content, index_name(ranks.rank): index})
            entry = [*Entry(index_name(ranks.rank), len(index), bytes_digest(index)), len(content), [self.keepers.names[place] for place in stored]]
        except RunError as error:
            trouble = str(error)
        every = vote(ranks, f"the checkpoint of step {work.step} in memory", trouble, entry)
        if ranks.rank == 0:
            data = Manifest(work.step, mesh, work.state, tuple(Entry(*each[:3]) for each in every), ()).to_json()
            try:
                self.keepers.commit(work.step, {MANIFEST: data, MARKER: marker_of(data)})
            except RunError as error:
                trouble = str(error)
        # No rank goes on before the checkpoint counts.
        vote(ranks, f"the checkpoint of step {work.step} in memory", trouble)
        where: dict[str, list[int]] = {}
        for rank, (_, _, _, _, names) in enumerate(every):
            for each in names:
                where.setdefault(each, []).append(rank)
        return Written(self.name, work.step, sum(size for *_, size, _ in every), perf_counter() - began, where)
