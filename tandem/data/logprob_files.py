"""Log-probabilities of the documents of a tokenized dataset, precomputed by a model: a file for each shard.

``SHARD.float32`` (or ``.float64``) has a little-endian number for every token of the shard's documents, in their order: nats of a learned
token, 0 of any other. The place of a document follows from the lengths of those before it, as in the shard itself."""

import itertools
import mmap
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tandem.data.shard_files import ShardFiles
from tandem.data.stream import Piece
from tandem.data.tokenizing.tokenize import TokenizedDataset
from tandem.types.dtypes import DTYPE_BYTES

TYPE_CODES: Mapping[str, Literal["f", "d"]] = {"float32": "f", "float64": "d"}


def logprob_dtype(dtype: str) -> str:
    """Returns the dtype that holds the log-probabilities of a model of ``dtype`` without rounding: those of a model in 16 bits are fp32."""
    return "float64" if dtype == "float64" else "float32"


def reference_bytes(dataset: TokenizedDataset, dtype: str) -> int:
    """Returns the bytes of the files of ``dataset`` for a model of ``dtype``."""
    return dataset.tokens * DTYPE_BYTES[logprob_dtype(dtype)]


class LogprobFiles:
    """The files of the dataset ``files`` in ``folder``, for a model of ``dtype``; each is opened when it is first read."""

    def __init__(self, folder: Path, files: ShardFiles, dtype: str) -> None:
        self.folder, self.files, self.dtype = folder, files, logprob_dtype(dtype)
        self._memory: dict[int, memoryview[float]] = {}
        self._starts: dict[int, list[int]] = {}

    def path(self, shard: int) -> Path:
        """Returns the file of shard ``shard``."""
        return self.folder / f"{self.files.dataset.shards[shard].name}.{self.dtype}"

    def content(self, shard: int, logprobs: Sequence[Sequence[float]]) -> bytes:
        """Returns the bytes of the file of shard ``shard``. ``logprobs``: of each document, one entry per token."""
        values = array(TYPE_CODES[self.dtype], itertools.chain.from_iterable(logprobs))
        assert len(values) == self.files.dataset.shards[shard].tokens
        return values.tobytes()

    def beside(self, sequence: Callable[[int], list[Piece]]) -> Callable[[int], list[Piece]]:
        """Returns ``sequence``, of whole documents of the dataset, with the log-probabilities as ``reference`` of each piece."""
        return lambda index: [piece._replace(reference=self._of(piece.shard, piece.document)) for piece in sequence(index)]

    def _of(self, shard: int, document: int) -> "memoryview[float]":
        if shard not in self._memory:
            with self.path(shard).open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._memory[shard] = memoryview(content).cast(TYPE_CODES[self.dtype])
            self._starts[shard] = list(itertools.accumulate(self.files.lengths(shard), initial=0))
        starts = self._starts[shard]
        return self._memory[shard][starts[document] : starts[document + 1]]
