"""The parts of a version that a pod has in its own memory already, by their digests: they are not read from another pod again. No torch."""

from tandem.types.weights import WeightManifest
from tandem.weight_transfer.copying import address_of, copy_and_digest, digest_of
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.pieces import Piece, pieces_of


class LocalParts:
    """``in_place``: what the segment that is written to has held; ``beside``: what ``segment`` holds. Both were verified when they were brought, and their
    segments' labels say that they are there. ``trusts``: whether parts that stay in their place need not be read for their digest; engines compare it when
    they copy them out. Parts from beside are always compared."""

    def __init__(
        self, in_place: WeightManifest | None, beside: WeightManifest | None = None, segment: Segment | None = None, *, trusts: bool = True
    ) -> None:
        self._in_place = set() if in_place is None else {(piece.offset_bytes, piece.size_bytes, piece.expected) for piece in pieces_of(in_place)}
        self._beside = {} if beside is None else {(piece.expected, piece.size_bytes): piece.offset_bytes for piece in pieces_of(beside)}
        self._segment, self._trusts = segment, trusts

    def fill(self, piece: Piece, into: Segment) -> bool:
        """Returns whether ``into`` has the bytes of ``piece`` in their place now."""
        base = address_of(into.memory) + piece.offset_bytes
        is_there = (piece.offset_bytes, piece.size_bytes, piece.expected) in self._in_place
        if is_there and (self._trusts or digest_of(base, piece.size_bytes) == piece.expected):
            return True
        at = self._beside.get((piece.expected, piece.size_bytes))
        if at is None or self._segment is None:
            return False
        return copy_and_digest(base, address_of(self._segment.memory) + at, piece.size_bytes, of_source=False) == piece.expected


NOTHING_HERE = LocalParts(None)
