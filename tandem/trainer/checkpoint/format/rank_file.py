"""A rank's file: its shards in the safetensors format, and an index of their offsets and of every chunk's digest. Imports no torch."""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.layout.shard_offsets import ShardOffsets
from tandem.storage.digests import chunk_digest
from tandem.storage.direct import read_from_disk, write_new
from tandem.trainer.checkpoint.format.shard import Key, Piece
from tandem.types.dtypes import DTYPE_BYTES, SAFETENSORS_NAMES

ALIGNMENT = 64
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


class Placed(NamedTuple):
    """A piece that begins at byte ``offset`` of its file."""

    piece: Piece
    offset: int


@dataclass(frozen=True, slots=True)
class RankIndex:
    """Describes ``file``: ``size`` bytes, of which chunk i (of ``chunk_bytes``) has the digest ``chunks[i]``. ``own``: the state that only
    this rank has, its random number generators."""

    rank: int
    file: str
    size: int
    chunk_bytes: int
    algorithm: str
    chunks: tuple[str, ...]
    placed: tuple[Placed, ...]
    own: Mapping[str, Any]

    def to_json(self) -> bytes:
        pieces = [
            [*placed.piece.key, SAFETENSORS_NAMES[placed.piece.dtype], placed.piece.whole, *placed.piece.offsets, placed.offset] for placed in self.placed
        ]
        content = {
            "rank": self.rank, "file": self.file, "size": self.size, "chunk_bytes": self.chunk_bytes, "algorithm": self.algorithm,
            "chunks": self.chunks, "pieces": pieces, "own": dict(self.own),
        }  # fmt: skip
        return (json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n").encode()


def read_index(data: bytes) -> RankIndex:
    """Parses an index. Raises ``ValueError`` if it is not valid."""
    try:
        content = json.loads(data)
        placed = [
            Placed(Piece(Key(state, name), tuple(whole), ShardOffsets(tuple(start), tuple(stop)), _DTYPES[dtype]), int(offset))
            for state, name, dtype, whole, start, stop, offset in content["pieces"]
        ]
        return RankIndex(
            int(content["rank"]), str(content["file"]), int(content["size"]), int(content["chunk_bytes"]), str(content["algorithm"]),
            tuple(content["chunks"]), tuple(placed), content["own"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is not a valid rank file index: {error}") from None


class Layout(NamedTuple):
    """A file's header bytes, its pieces and its size in bytes."""

    header: bytes
    placed: tuple[Placed, ...]
    size: int


def lay_out(pieces: Sequence[Piece]) -> Layout:
    """Lays out a file of ``pieces``. The widest dtypes come first, so that every tensor is aligned to its own."""
    ordered = sorted(pieces, key=lambda piece: (-DTYPE_BYTES[piece.dtype], piece.key, piece.offsets))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    offsets = []
    for piece in ordered:
        where = ",".join(f"{a}:{b}" for a, b in zip(*piece.offsets, strict=True))
        header[f"{piece.key}[{where}]"] = {
            "dtype": SAFETENSORS_NAMES[piece.dtype], "shape": piece.offsets.shape, "data_offsets": [offset, offset + piece.nbytes],
        }  # fmt: skip
        offsets.append(offset)
        offset += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    beginning = struct.pack("<Q", len(text)) + text
    placed = tuple(Placed(piece, len(beginning) + at) for piece, at in zip(ordered, offsets, strict=True))
    return Layout(beginning, placed, len(beginning) + offset)


def write_chunks(path: Path, content: memoryview, algorithm: str, chunk_bytes: int) -> tuple[str, ...]:
    """Writes ``content`` and flushes it to the disk; returns the digest of every chunk as it was in memory."""
    digest, digests = chunk_digest(algorithm), []

    def chunks() -> Iterator[memoryview]:
        for start in range(0, len(content), chunk_bytes):
            chunk = content[start : start + chunk_bytes]
            digests.append(digest(chunk))
            yield chunk

    write_new(path, chunks(), len(content))
    return tuple(digests)


def damaged_chunk(path: Path, index: RankIndex, from_disk: bool = False) -> str | None:
    """Returns what is wrong with the file ``path`` of ``index`` in one line, or ``None``. ``from_disk``: bypasses the page cache, which may
    still hold what was written."""
    try:
        size = path.stat().st_size
        if size != index.size:
            return f"'{path.name}' has {size} bytes instead of {index.size}"
        digest, start = chunk_digest(index.algorithm), 0
        chunks = (read_from_disk if from_disk else _read)(path, index.size, index.chunk_bytes)
        for chunk, wanted in zip(chunks, index.chunks, strict=True):
            if digest(chunk) != wanted:
                return f"'{path.name}' does not have the digest it was written with at bytes {start} to {start + len(chunk)}"
            start += len(chunk)
    except (OSError, ValueError) as error:
        return f"'{path.name}' cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def _read(path: Path, size: int, chunk_bytes: int) -> Iterator[memoryview]:
    memory = memoryview(bytearray(chunk_bytes))
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, chunk_bytes):
            wanted = memory[: min(chunk_bytes, size - start)]
            if os.preadv(file.fileno(), [wanted], start) != len(wanted):
                raise ValueError("it is shorter than its index says")
            yield wanted


def write_small(path: Path, data: bytes) -> None:
    """Writes a small file and flushes it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
