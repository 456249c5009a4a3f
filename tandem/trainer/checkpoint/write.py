"""Writes one checkpoint from staged memory to the disk, in phases that all ranks vote on.

``prepare``: rank 0 makes a fresh folder. ``write``: every rank writes its file and index. ``manifest``: rank 0 writes the manifest.
``verify``: every rank reads its bytes back from the disk and compares them with the manifest. ``commit``: rank 0 sets the marker and
renames the folder to its final name. A process that dies at any point leaves earlier checkpoints unchanged, and at most a folder that
readers ignore.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem.runtime.collectives.agreement import vote
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.faults import FaultPoint
from tandem.storage.digests import CHUNK_BYTES, best_algorithm, bytes_digest
from tandem.storage.disk_space import free_bytes
from tandem.storage.folder_manifest import sync_path
from tandem.trainer.checkpoint.format.commit import FULL, MARKER
from tandem.trainer.checkpoint.format.manifest import (
    MANIFEST,
    Damaged,
    Entry,
    Manifest,
    check_companions,
    data_name,
    entry_of,
    index_name,
    marker_of,
    read_entry,
    read_manifest,
)
from tandem.trainer.checkpoint.format.rank_file import RankIndex, damaged_chunk, write_chunks, write_small
from tandem.trainer.checkpoint.staging import Staging
from tandem.types import RunError

PHASES = ("prepare", "write", "manifest", "verify", "commit")
"""Names of fault points, as ``before:checkpoint_write:STEP``."""


@dataclass(frozen=True, slots=True)
class Work:
    """A checkpoint to write. ``state``: shared by all ranks; ``own``: of this rank alone."""

    step: int
    staged: Staging
    state: Mapping[str, Any]
    own: Mapping[str, Any]
    companions: Sequence[Path]


@dataclass(frozen=True, slots=True)
class Committed:
    """A complete checkpoint on the disk. ``digest`` covers every byte; ``write_s``: seconds from the staged copy to the commit, in the
    background."""

    step: int
    folder: Path
    digest: str
    write_s: float


def write_checkpoint(
    checkpoints: Path, ranks: Communicator, mesh: Mapping[str, int], work: Work, fault_point: FaultPoint, is_first: bool | None = None
) -> Committed:
    """Commits ``checkpoints/step-N`` together with the other ranks. Raises ``RunError`` on all ranks if it fails on one; earlier
    checkpoints are unchanged. ``is_first``: this rank makes and commits the folder, where several ranks do, each on a disk of its own (``None``: rank 0
    does)."""
    began = perf_counter()
    final = checkpoints / f"step-{work.step}"
    fresh = checkpoints / f".{final.name}.tmp"
    is_first = ranks.rank == 0 if is_first is None else is_first

    def phase(name: str, act: Callable[[], Any]) -> list[Any]:
        fault_point(f"before:checkpoint_{name}:{work.step}")
        value, trouble = None, None
        try:
            value = act()
        except OSError as error:
            trouble = _line(error, checkpoints)
        except RunError as error:
            trouble = str(error)
        values = vote(ranks, f"the checkpoint of step {work.step} is not committed ({name})", trouble, value)
        fault_point(f"after:checkpoint_{name}:{work.step}")
        return values

    try:
        phase("prepare", lambda: _prepare(checkpoints, fresh) if is_first else None)
        entries = [Entry(*entry) for entry in phase("write", lambda: _write(fresh, ranks.rank, work))]
        [digest, *_] = phase("manifest", lambda: _write_manifest(fresh, work, mesh, entries) if is_first else None)
        phase("verify", lambda: _read_back(fresh, ranks.rank, entries, digest))
        phase("commit", lambda: _commit(fresh, final) if is_first else None)
    except RunError:
        # Nothing is removed by a rank that only lost its neighbours: a new job may already be using the same folder.
        if is_first:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    return Committed(work.step, final, digest, perf_counter() - began)


def _prepare(checkpoints: Path, fresh: Path) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()


def _write(fresh: Path, rank: int, work: Work) -> Entry:
    staged, algorithm = work.staged, best_algorithm()
    chunks = write_chunks(fresh / data_name(rank), staged.content, algorithm, CHUNK_BYTES)
    layout = staged.layout
    index = RankIndex(rank, data_name(rank), layout.size, CHUNK_BYTES, algorithm, chunks, layout.placed, work.own)
    data = index.to_json()
    write_small(fresh / index_name(rank), data)
    return Entry(index_name(rank), len(data), bytes_digest(data))


def _write_manifest(fresh: Path, work: Work, mesh: Mapping[str, int], entries: Sequence[Entry]) -> str:
    for companion in work.companions:
        shutil.copyfile(companion, fresh / companion.name)
        sync_path(fresh / companion.name)
    companions = tuple(entry_of(fresh / companion.name) for companion in work.companions)
    data = Manifest(work.step, mesh, work.state, tuple(entries), companions).to_json()
    write_small(fresh / MANIFEST, data)
    return bytes_digest(data)


def _read_back(fresh: Path, rank: int, entries: Sequence[Entry], digest: str) -> None:
    manifest, actual = read_manifest(fresh, committed=False)
    if actual != digest or list(manifest.indexes) != list(entries):
        raise Damaged(f"its {MANIFEST} is not what was written")
    index = read_entry(fresh, manifest.indexes[rank])
    trouble = damaged_chunk(fresh / index.file, index, from_disk=True)
    if trouble is not None:
        raise Damaged(trouble)
    if rank == 0:
        check_companions(fresh, manifest.companions)


def _commit(fresh: Path, final: Path) -> None:
    write_small(fresh / MARKER, marker_of((fresh / MANIFEST).read_bytes()))
    sync_path(fresh)
    replaced = None
    if final.exists():
        # An older or damaged checkpoint of this step.
        replaced = final.rename(final.parent / f".{final.name}.replaced.tmp")
    fresh.rename(final)
    sync_path(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _line(error: OSError, folder: Path) -> str:
    if error.errno in FULL:
        free = 0.0
        with suppress(OSError):
            free = free_bytes(folder) / 2**20
        return f"no space left in '{folder}' ({free:.0f} MiB free); free some space and resume, what was committed before is untouched"
    return f"'{error.filename or folder}': {error.strerror or error}; what was committed before is untouched"
