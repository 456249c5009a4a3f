"""Reads tensors from a checkpoint written by any mesh: only the bytes that overlap the request, with every chunk verified."""

import ctypes
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.layout.shard_offsets import ShardOffsets, difference, intersection, is_covered, whole_offsets
from tandem.storage.digests import chunk_digest, chunks_over
from tandem.trainer.checkpoint.format.manifest import Damaged, Manifest, parse_entry, read_indexes
from tandem.trainer.checkpoint.format.rank_file import Placed, RankIndex
from tandem.trainer.checkpoint.format.shard import Key, Shard
from tandem.types import UserError

BLOCK_BYTES = 64 << 20
"""Bytes of a piece that are in memory at a time, plus its last row."""


class Stored(NamedTuple):
    """The location of a stored part of a tensor."""

    file: RankIndex
    placed: Placed


class Source(Protocol):
    """The files of a checkpoint that are not in a folder. ``verified``: the chunks, by file and number, of which ``pread`` returns the bytes that this process
    has compared with their digests."""

    @property
    def verified(self) -> set[tuple[str, int]]: ...

    def small(self, name: str) -> bytes: ...

    def pread(self, name: str, size: int, offset: int) -> memoryview: ...

    def forget(self) -> None:
        """Frees what was read: everything is loaded."""
        ...


class Contents:
    """The content of the checkpoint ``folder``, or of ``source``: of the model that is trained, or of the one beside it of the
    name ``of``, under the same keys."""

    def __init__(self, folder: Path, manifest: Manifest, of: str = "", source: Source | None = None) -> None:
        self.folder, self.manifest, self._source = folder, manifest, source
        if source is None:
            self.indexes = read_indexes(folder, manifest)
        else:
            self.indexes = [parse_entry(source.small(entry.name), entry) for entry in manifest.indexes]
        self.stored: Mapping[Key, list[Stored]] = defaultdict(list)
        for index in self.indexes:
            for placed in index.placed:
                model, key = placed.piece.key.split()
                if model == of:
                    self.stored[key].append(Stored(index, placed))

    @property
    def held(self) -> list[Key]:
        return sorted(self.stored)

    def whole(self, key: Key) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape and dtype of a tensor. Raises ``KeyError``."""
        piece = self.stored[key][0].placed.piece if key in self.stored else None
        if piece is None:
            raise KeyError(str(key))
        return piece.whole, getattr(torch, piece.dtype)

    def tensor(self, key: Key) -> Tensor:
        """Returns a whole tensor. Raises ``KeyError``, ``UserError`` if parts of it are missing, ``Damaged``."""
        size, dtype = self.whole(key)
        tensor = torch.empty(size, dtype=dtype)
        self.read([Shard(key, size, whole_offsets(size), tensor)])
        return tensor

    def own(self, rank: int, size: int) -> Mapping[str, Any] | None:
        """Returns the state that only ``rank`` of ``size`` has; ``None`` if another number of ranks wrote the checkpoint."""
        return self.indexes[rank].own if len(self.indexes) == size else None

    def read(self, shards: Sequence[Shard]) -> int:
        """Fills ``shards`` and returns the number of bytes read.

        All shards are checked before the first is filled: raises ``UserError`` for a tensor that is incomplete or has another shape or
        dtype, and ``Damaged`` while reading."""
        self.check(shards)
        with ExitStack() as stack:
            files: dict[int, _ChunkedFile] = {}
            for shard in shards:
                left = [shard.offsets]
                for index, placed in self.stored[shard.key]:
                    for common in [overlap for part in left if (overlap := intersection(part, placed.piece.offsets)) is not None]:
                        if index.rank not in files:
                            files[index.rank] = stack.enter_context(_ChunkedFile(self.folder / index.file, index, self._source))
                        _copy(files[index.rank], placed, common, shard)
                    left = [rest for part in left for rest in difference(part, placed.piece.offsets)]
            return sum(file.read_bytes for file in files.values())

    def check(self, shards: Sequence[Shard]) -> None:
        """Raises ``UserError`` where ``read`` would; the shards may be on the ``meta`` device."""
        for shard in shards:
            self._check(shard)

    def _check(self, shard: Shard) -> None:
        parts = self.stored.get(shard.key)
        if not parts:
            raise UserError(f"it has no '{shard.key}'")
        whole, dtype = self.whole(shard.key)
        if whole != shard.whole or dtype != shard.tensor.dtype:
            raise UserError(f"its '{shard.key}' is {dtype} {list(whole)}; expected {shard.tensor.dtype} {list(shard.whole)}")
        if not is_covered(shard.offsets, [stored.placed.piece.offsets for stored in parts]):
            raise UserError(f"its '{shard.key}' is incomplete")


class _ChunkedFile:
    """Reads a rank's file chunk by chunk and compares each with its digest. The last chunk is cached, because neighbours share it."""

    def __init__(self, path: Path, index: RankIndex, source: Source | None = None) -> None:
        self._path, self._index, self._source = path, index, source
        self._digest = chunk_digest(index.algorithm)
        self._last: tuple[int, bytes | memoryview] | None = None
        self.read_bytes = 0

    def __enter__(self) -> "_ChunkedFile":
        if self._source is not None:
            return self
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise Damaged(f"'{self._path.name}' cannot be read: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._source is None:
            os.close(self._descriptor)

    def read(self, start: int, stop: int) -> bytearray:
        """Returns the bytes ``start .. stop - 1``, verified. Raises ``Damaged``."""
        out = bytearray(stop - start)
        self.read_into(start, stop, memoryview(out))
        return out

    def read_into(self, start: int, stop: int, out: memoryview) -> None:
        """Writes the bytes ``start .. stop - 1`` to ``out``, verified. Raises ``Damaged``."""
        size = self._index.chunk_bytes
        for number in chunks_over(start, stop, size):
            chunk, first = self._chunk(number), number * size
            begin, end = max(start, first), min(stop, first + len(chunk))
            out[begin - start : end - start] = memoryview(chunk)[begin - first : end - first]

    def _chunk(self, number: int) -> bytes | memoryview:
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        size = self._index.chunk_bytes
        wanted = min(size, self._index.size - number * size)
        data: bytes | memoryview
        if self._source is None:
            data = os.pread(self._descriptor, wanted, number * size)
        else:
            data = self._source.pread(self._index.file, wanted, number * size)
        self.read_bytes += len(data)
        known = (self._index.file, number)
        is_known = self._source is not None and known in self._source.verified
        if len(data) != wanted or not (is_known or self._digest(data) == self._index.chunks[number]):
            raise Damaged(f"'{self._path.name}' does not have the digest it was written with at bytes {number * size} to {number * size + wanted}")
        if self._source is not None:
            self._source.verified.add(known)
        self._last = (number, data)
        return data


def _copy(file: _ChunkedFile, placed: Placed, common: ShardOffsets, shard: Shard) -> None:
    """Copies ``common`` from where ``placed`` is stored into the shard, a block of rows at a time."""
    piece = placed.piece
    inside, target = common.within(piece.offsets), shard.tensor[common.within(shard.offsets).slices]
    if not piece.whole:
        target.copy_(_tensor(file.read(placed.offset, placed.offset + piece.nbytes), getattr(torch, piece.dtype)))
        return
    row = piece.nbytes // piece.offsets.shape[0]
    rows = max(1, BLOCK_BYTES // row)
    (first, *_), (last, *_) = inside
    for begin in range(first, last, rows):
        end = min(begin + rows, last)
        block = target[begin - first : end - first]
        if block.nbytes == (end - begin) * row and block.is_contiguous() and block.device.type == "cpu" and block.dtype == getattr(torch, piece.dtype):
            # Whole rows, one after the other: no copy between.
            file.read_into(placed.offset + begin * row, placed.offset + end * row, _memory_of(block))
            continue
        data = _tensor(file.read(placed.offset + begin * row, placed.offset + end * row), getattr(torch, piece.dtype))
        block.copy_(data.view(end - begin, *piece.offsets.shape[1:])[(slice(None), *inside.slices[1:])])


def _memory_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous ``tensor`` on the CPU, which must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _tensor(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype)
