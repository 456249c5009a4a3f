"""Checkpoints in the memory of nodes as a tier: written with votes of all ranks as ``checkpoint.write`` has them, verified and read by all together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from tandem.runtime.collectives.agreement import vote
from tandem.runtime.collectives.communicator import Communicator
from tandem.storage.digests import CHUNK_BYTES, best_algorithm, bytes_digest, chunk_digest
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Entry, Manifest, data_name, index_name, marker_of
from tandem.trainer.checkpoint.format.rank_file import RankIndex
from tandem.trainer.checkpoint.tiers.kept_tier import KeptTier
from tandem.trainer.checkpoint.tiers.tier import TierName, Written
from tandem.trainer.checkpoint.write import Work
from tandem.types import RunError


@dataclass
class MemoryTier(KeptTier):
    """Checkpoints in the memory of nodes."""

    name: TierName = field(default="memory", init=False)

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
