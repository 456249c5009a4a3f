"""The manifest of one set of weights: what a reader must find, byte for byte."""

from dataclasses import dataclass

from tandem.types.sample import WeightVersion


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a segment. ``name`` and ``shape`` are Hugging Face's; ``offset_bytes`` is a multiple of 64;
    ``digest`` is the xxh3-128 of the ``size_bytes`` bytes, in hexadecimal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: str
    offset_bytes: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """All tensors of one weight version. ``digest`` is the xxh3-128 over every entry's name, dtype, shape and digest."""

    version: WeightVersion
    tensors: tuple[TensorEntry, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        return sum(t.size_bytes for t in self.tensors)
