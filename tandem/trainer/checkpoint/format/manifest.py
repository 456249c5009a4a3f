"""The manifest of a checkpoint: digests of digests, from the marker down to every chunk of every rank's file.

``COMMIT`` names the digest of ``MANIFEST.json``, which names the digests of every rank's index and of the companion files; an index names
the digests of its file's chunks. One digest therefore covers every byte.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.storage.digests import bytes_digest
from tandem.storage.folder_manifest import file_digest
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.older_version import MANIFEST, is_of_older_version
from tandem.trainer.checkpoint.format.rank_file import RankIndex, damaged_chunk, read_index
from tandem.types import RunError

FORMAT = "tandem-shards-1"


class Entry(NamedTuple):
    """A file of ``size`` bytes with its BLAKE2b-128 ``digest``."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``MANIFEST.json``.

    ``state``: what all ranks share (counters, the position in the data). ``mesh``: the sizes of the writing ranks' mesh, by axis.
    ``indexes`` by rank; ``companions``: other files copied into the folder."""

    step: int
    mesh: Mapping[str, int]
    state: Mapping[str, Any]
    indexes: tuple[Entry, ...]
    companions: tuple[Entry, ...]

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT, "step": self.step, "mesh": dict(self.mesh), "state": dict(self.state), "indexes": self.indexes,
            "companions": self.companions,
        }  # fmt: skip
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def index_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def data_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def marker_of(manifest: bytes) -> bytes:
    """Returns the content of the marker that commits a folder with this manifest."""
    return (json.dumps({"format": FORMAT, "manifest": bytes_digest(manifest)}) + "\n").encode()


class Damaged(RunError):
    """Raised for a checkpoint that is not as it was written; the message says what is wrong, without the folder's name."""


def read_manifest(folder: Path, committed: bool = True) -> tuple[Manifest, str]:
    """Returns the manifest of ``folder`` and its digest, which the marker must name if the folder is ``committed``. Raises ``Damaged``."""
    data = _bytes(folder / MANIFEST) if (folder / MARKER).is_file() or not committed else None
    if is_of_older_version(folder):
        raise Damaged("it was written by an older version of Tandem, which alone can read it")
    if data is None:
        raise Damaged(f"it has no {MARKER} marker: it was never completed" if folder.is_dir() else "it does not exist")
    if committed and _bytes(folder / MARKER) != marker_of(data):
        raise Damaged(f"its {MARKER} marker and its {MANIFEST} do not match")
    return parse_manifest(data), bytes_digest(data)


def parse_manifest(data: bytes) -> Manifest:
    """Returns the manifest of which ``data`` are the bytes. Raises ``Damaged``."""
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise ValueError(f"format '{content['format']}'")
        entries = lambda rows: tuple(Entry(str(name), int(size), str(digest)) for name, size, digest in rows)
        return Manifest(int(content["step"]), content["mesh"], content["state"], entries(content["indexes"]), entries(content["companions"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its {MANIFEST} cannot be read: {error}") from None


def read_indexes(folder: Path, manifest: Manifest) -> list[RankIndex]:
    """Returns every rank's index, verified. Raises ``Damaged``."""
    return [read_entry(folder, entry) for entry in manifest.indexes]


def read_entry(folder: Path, entry: Entry) -> RankIndex:
    """Returns the index that ``entry`` names, verified. Raises ``Damaged``."""
    return parse_entry(_bytes(folder / entry.name), entry)


def parse_entry(data: bytes, entry: Entry) -> RankIndex:
    """Returns the index of ``entry`` of which ``data`` are the bytes, verified. Raises ``Damaged``."""
    if len(data) != entry.size or bytes_digest(data) != entry.digest:
        raise Damaged(f"'{entry.name}' does not have the digest that its {MANIFEST} names")
    try:
        return read_index(data)
    except ValueError as error:
        raise Damaged(f"'{entry.name}': {error}") from None


def verify(folder: Path, rank: int = 0, size: int = 1) -> tuple[Manifest, str]:
    """Reads every byte of the checkpoint ``folder`` and compares it with its digest; returns the manifest and its digest. Raises
    ``Damaged``.

    With ``size`` callers, each reads every ``size``-th file."""
    manifest, digest = read_manifest(folder)
    for number, entry in enumerate(manifest.indexes):
        index = read_entry(folder, entry)
        if index.rank != number:
            raise Damaged(f"'{entry.name}' is the index of rank {index.rank}")
        trouble = damaged_chunk(folder / index.file, index) if number % size == rank else _wrong_size(folder / index.file, index.size)
        if trouble is not None:
            raise Damaged(trouble)
    check_companions(folder, manifest.companions)
    return manifest, digest


def check_companions(folder: Path, companions: Sequence[Entry]) -> None:
    """Raises ``Damaged`` if a companion file does not have its size and digest."""
    for entry in companions:
        path = folder / entry.name
        trouble = _wrong_size(path, entry.size)
        if trouble is None and file_digest(path, "blake2b_128").digest != entry.digest:
            trouble = f"'{entry.name}' does not have the digest it was written with"
        if trouble is not None:
            raise Damaged(trouble)


def entry_of(path: Path) -> Entry:
    found = file_digest(path, "blake2b_128")
    return Entry(path.name, found.size, found.digest)


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        return f"'{path.name}' cannot be read: {error.strerror}"
    return None if actual == size else f"'{path.name}' has {actual} bytes instead of {size}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"'{path.name}' cannot be read: {error.strerror or error}") from None
