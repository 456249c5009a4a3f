"""Writes a checkpoint to the memory of the nodes, with votes of all ranks as ``checkpoint.write`` has them."""

from collections.abc import Mapping
from time import perf_counter

from tandem.runtime.collectives.agreement import vote
from tandem.runtime.collectives.communicator import Communicator
from tandem.storage.digests import CHUNK_BYTES, best_algorithm, bytes_digest, chunk_digest
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Entry, Manifest, data_name, index_name, marker_of
from tandem.trainer.checkpoint.format.rank_file import RankIndex
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.write import Work
from tandem.types import RunError


def write_to_memory(keepers: Keepers, ranks: Communicator, mesh: Mapping[str, int], work: Work) -> float:
    """Commits the checkpoint of ``work`` in memory together with the other ranks; returns the seconds that it took. Raises ``RunError`` on all ranks if some
    rank's file has no place."""
    began, trouble, entry = perf_counter(), None, None
    content, algorithm = work.staged.content, best_algorithm()
    digest, name = chunk_digest(algorithm), data_name(ranks.rank)
    chunks = tuple(digest(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES))
    index = RankIndex(ranks.rank, name, work.staged.layout.size, CHUNK_BYTES, algorithm, chunks, work.staged.layout.placed, work.own).to_json()
    try:
        keepers.put(work.step, {name: content, index_name(ranks.rank): index})
        entry = Entry(index_name(ranks.rank), len(index), bytes_digest(index))
    except RunError as error:
        trouble = str(error)
    entries = vote(ranks, f"the checkpoint of step {work.step} in memory", trouble, entry)
    if ranks.rank == 0:
        data = Manifest(work.step, mesh, work.state, tuple(Entry(*each) for each in entries), ()).to_json()
        keepers.commit(work.step, {MANIFEST: data, MARKER: marker_of(data)})
    # No rank goes on before the checkpoint counts.
    ranks.barrier("the checkpoint in memory")
    return perf_counter() - began
