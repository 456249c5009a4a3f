"""The manifest of one set of weights: what a reader must find, byte for byte."""

from dataclasses import dataclass
from typing import Literal

from tandem.types.sample import WeightVersion

Layout = Literal["rows", "panels"]
"""Where the elements of a tensor are in its bytes: ``rows``: row-major; ``panels``: as the engine's kernels on a CPU multiply with a matrix
(``tandem.layout.panels``)."""


@dataclass(frozen=True, slots=True)
class PartEntry:
    """The elements with ``start[i] <= index[i] < stop[i]`` of a tensor, row-major. ``owner``: the trainer's rank that wrote them;
    ``digest``: the xxh3-128 of their bytes, in hexadecimal."""

    owner: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a segment. ``name`` and ``shape`` are Hugging Face's; ``offset_bytes`` is a multiple of 64. ``parts`` cover the tensor
    once and lie one behind the other from ``offset_bytes`` on, in the order of their ``start``. Parts that are runs of rows therefore form
    the tensor in its ``layout``; a part of some columns is contiguous in itself."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: str
    offset_bytes: int
    size_bytes: int
    parts: tuple[PartEntry, ...]
    layout: Layout = "rows"


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """All tensors of one weight version. ``digest`` is the xxh3-128 over every entry's name, dtype, shape, parts and their digests."""

    version: WeightVersion
    tensors: tuple[TensorEntry, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors)

    @property
    def owners(self) -> tuple[int, ...]:
        """The trainer's ranks that wrote a part, ascending."""
        return tuple(sorted({part.owner for tensor in self.tensors for part in tensor.parts}))


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where published weights are read, in plain values that every rank of an engine can be sent. ``store``: the address of the coordination
    store; ``threads``: how many copy, on all ranks of an engine together. ``verifies``: whether the engine copies the weights and compares their digests;
    otherwise it takes them from the shared memory as they are, and does not say that it holds them before it is told that they were verified.
    ``shares``: whether an engine that can compute with the published weights where they are does so, instead of with a copy.
    ``opening``: a source with another number opens the store anew, because its file may be another one under the same name."""

    store: str
    threads: int = 2
    verifies: bool = True
    shares: bool = False
    opening: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update of an engine's weights did: ``size_bytes`` of ``version`` were read, on all ranks together, and applied. ``rereads``:
    names of tensors whose digest did not match at first, in which case all was read again. ``revision``: in the store, of the publication that was read, the
    oldest of all ranks."""

    version: WeightVersion
    size_bytes: int
    rereads: tuple[str, ...]
    revision: int = 0
