"""Shards of token ids in the WebDataset format: a tar file with one ``KEY.npy`` per document, and a file of their lengths. For supervised
fine-tuning each is followed by a ``KEY.learned.npy``: one byte per token, 1 if the token is learned. In a shard of preference pairs with margins each
is also followed by a ``KEY.margin.npy``, the margin of its pair.

Any WebDataset reader can read them (``webdataset.WebDataset(url).decode()`` returns an array per document). Because every entry is an array
of a known dtype, the offset of a document follows from the preceding lengths, and our reader needs no scan.
"""

import hashlib
import itertools
import mmap
import struct
import tarfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tandem.types import RunError

BLOCK_BYTES = 512
NPY_HEADER_BYTES = 128
LENGTH_BYTES = array("I").itemsize
AGAIN = "run the command that made it (tandem tokenize) again"
MASK_DTYPE, MARGIN_DTYPE = "uint8", "float32"
TYPE_CODES: dict[str, Literal["B", "H", "I", "f"]] = {MASK_DTYPE: "B", "uint16": "H", "uint32": "I", MARGIN_DTYPE: "f"}


def token_dtype(vocab_size: int) -> str:
    """Returns the narrowest dtype that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True, slots=True)
class Shard:
    """A committed shard: ``NAME.tar`` and ``NAME.lengths``. ``digest``: BLAKE2b-128 of the tar file, ``lengths_digest`` of the other, in
    hexadecimal. ``size``: bytes of the tar file. ``skipped``: broken documents of its source that are left out. ``learned``: number of
    learned tokens (``None``: the shard has no masks). ``margins``: ``True`` if every document has the margin of its pair, else ``None``."""

    name: str
    documents: int
    tokens: int
    size: int
    digest: str
    lengths_digest: str
    skipped: int = 0
    learned: int | None = None
    margins: bool | None = None

    @property
    def has_masks(self) -> bool:
        return self.learned is not None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Shard":
        return Shard(**data)


class ShardWriter:
    """Writes ``NAME.tar`` and ``NAME.lengths`` to ``folder``. The bytes depend on the documents and ``dtype`` alone: no time, no owner.
    ``has_masks``: every document comes with a mask of the learned tokens; ``has_margins``: with the margin of its pair."""

    def __init__(self, folder: Path, name: str, dtype: str, has_masks: bool = False, has_margins: bool = False) -> None:
        self.folder, self.name, self.dtype, self.has_masks, self.has_margins = folder, name, dtype, has_masks, has_margins
        self.learned = 0
        self.lengths = array("I")
        self.size = self.skipped = 0
        self._file = (folder / f"{name}.tar").open("wb")
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, tokens: Sequence[int], learned: Sequence[int] = (), margin: float = 0.0) -> None:
        """Adds one document. ``learned``: 1 for each learned token and 0 for the others, if the shard has masks; ``margin``: if it has margins."""
        self._add_member("npy", self.dtype, tokens)
        if self.has_masks:
            assert len(learned) == len(tokens)
            self._add_member("learned.npy", MASK_DTYPE, learned)
            self.learned += sum(learned)
        if self.has_margins:
            self._add_member("margin.npy", MARGIN_DTYPE, [margin])
        self.lengths.append(len(tokens))

    def _add_member(self, suffix: str, dtype: str, values: Sequence[float]) -> None:
        content = array(TYPE_CODES[dtype], values).tobytes()  # type: ignore[arg-type]
        member = tarfile.TarInfo(f"{self.name}-{len(self.lengths):07d}.{suffix}")
        member.size = NPY_HEADER_BYTES + len(content)
        header = member.tobuf(tarfile.USTAR_FORMAT)
        self._write(header + npy_header(dtype, len(values)) + content + bytes(-member.size % BLOCK_BYTES))

    def close(self) -> Shard:
        """Finishes both files and returns the shard."""
        self._write(bytes(2 * BLOCK_BYTES))
        self._file.close()
        lengths = self.lengths.tobytes()
        (self.folder / f"{self.name}.lengths").write_bytes(lengths)
        return Shard(
            self.name, len(self.lengths), sum(self.lengths), self.size, self._digest.hexdigest(),
            hashlib.blake2b(lengths, digest_size=16).hexdigest(), self.skipped,
            self.learned if self.has_masks else None, self.has_margins or None,
        )

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)


def npy_header(dtype: str, count: int) -> bytes:
    """Returns the header of NumPy's format 1.0 for a flat array of ``count`` little-endian numbers, padded to 128 bytes."""
    letter = {MASK_DTYPE: "|u1", "uint16": "<u2", "uint32": "<u4", MARGIN_DTYPE: "<f4"}[dtype]
    text = f"{{'descr': '{letter}', 'fortran_order': False, 'shape': ({count},), }}"
    length = NPY_HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.encode("ascii").ljust(length - 1) + b"\n"


def entry_bytes(length: int, dtype: str) -> int:
    """Returns the bytes that an array of ``length`` numbers takes in the tar file."""
    content = NPY_HEADER_BYTES + length * array(TYPE_CODES[dtype]).itemsize
    return BLOCK_BYTES + -(-content // BLOCK_BYTES) * BLOCK_BYTES


class ShardReader:
    """Documents of a shard by their number. ``tar`` and ``lengths`` are local files; contents are read on access."""

    def __init__(self, tar: Path, lengths: Path, shard: Shard, dtype: str) -> None:
        self.dtype = dtype
        self.lengths = read_lengths(lengths.read_bytes(), shard)
        self.has_masks, self.has_margins = shard.has_masks, bool(shard.margins)
        dtypes = (dtype, MASK_DTYPE) if self.has_masks else (dtype,)
        beside = entry_bytes(1, MARGIN_DTYPE) if self.has_margins else 0
        self.starts = list(itertools.accumulate((sum(entry_bytes(n, one) for one in dtypes) + beside for n in self.lengths), initial=0))
        with tar.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._memory) != shard.size or self.starts[-1] + 2 * BLOCK_BYTES != shard.size:
            raise RunError(f"the shard '{tar}' has {len(self._memory)} bytes instead of {shard.size}; remove it, and {AGAIN}")

    def tokens(self, document: int, start: int, stop: int) -> "memoryview[int]":
        """Returns tokens ``start .. stop - 1`` of a document, as a view into the file."""
        return self._view(self.starts[document], self.dtype, start, stop)

    def learned(self, document: int, start: int, stop: int) -> "memoryview[int]":
        """Returns 1 for each learned token of ``start .. stop - 1``, else 0. The shard must have masks."""
        assert self.has_masks
        return self._view(self.starts[document] + entry_bytes(self.lengths[document], self.dtype), MASK_DTYPE, start, stop)

    def margin(self, document: int) -> float:
        """Returns the margin of the pair that the document belongs to; 0 if the shard has none."""
        if not self.has_margins:
            return 0.0
        at = self.starts[document + 1] - entry_bytes(1, MARGIN_DTYPE) + BLOCK_BYTES + NPY_HEADER_BYTES
        return float(memoryview(self._memory)[at : at + 4].cast("f")[0])

    def _view(self, entry: int, dtype: str, start: int, stop: int) -> "memoryview[int]":
        code = cast('Literal["B", "H", "I"]', TYPE_CODES[dtype])
        width, at = array(code).itemsize, entry + BLOCK_BYTES + NPY_HEADER_BYTES
        return memoryview(self._memory)[at + start * width : at + stop * width].cast(code)

    def close(self) -> None:
        """Closes the file. No view of it may exist any more."""
        self._memory.close()


def read_lengths(content: bytes, shard: Shard) -> "array[int]":
    """Returns the lengths in ``content``. Raises ``RunError`` if it differs from what was written."""
    if hashlib.blake2b(content, digest_size=16).hexdigest() != shard.lengths_digest:
        raise RunError(f"the lengths of shard '{shard.name}' are damaged; remove {shard.name}.lengths, and {AGAIN}")
    lengths = array("I")
    lengths.frombytes(content)
    return lengths


def verify(content: Iterable[bytes], shard: Shard) -> bool:
    """Returns whether the bytes of a tar file are those written."""
    digest = hashlib.blake2b(digest_size=16)
    for part in content:
        digest.update(part)
    return digest.hexdigest() == shard.digest


