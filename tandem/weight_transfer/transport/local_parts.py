"""The parts of a version that a pod has in its own memory already, by their digests: they are not read from another pod again. Neither are those that a delta
makes of such parts. No torch."""

import logging
from collections.abc import Sequence

from tandem.types.weights import WeightManifest
from tandem.weight_transfer.copying import Threads, address_of, copy_and_digest, digest_of
from tandem.weight_transfer.delta import Delta
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.pieces import Piece, pieces_of

logger = logging.getLogger(__name__)


class LocalParts:
    """``in_place``: what the segment that is written to has held; ``beside``: what ``segment`` holds. Both were verified when they were brought, and their
    segments' labels say that they are there. ``trusts``: whether parts that stay in their place need not be read for their digest; engines compare it when
    they copy them out. Parts from beside are always compared. ``delta``: what turns such parts into those of the version that is brought; what comes of it is
    always compared. ``threads``: as many parts are copied at once. ``whole``: why parts of the delta were not used, with their names."""

    def __init__(
        self, in_place: WeightManifest | None, beside: WeightManifest | None = None, segment: Segment | None = None, *, trusts: bool = True,
        delta: Delta | None = None, threads: Threads | None = None,
    ) -> None:  # fmt: skip
        self._in_place = set() if in_place is None else {(piece.offset_bytes, piece.size_bytes, piece.expected) for piece in pieces_of(in_place)}
        self._beside = {} if beside is None else {(piece.expected, piece.size_bytes): piece.offset_bytes for piece in pieces_of(beside)}
        self._segment, self._trusts, self._delta, self._threads = segment, trusts, delta, threads
        self.whole: list[str] = []

    def missing(self, pieces: Sequence[Piece], into: Segment) -> list[Piece]:
        """Returns those of ``pieces`` that are not here; the others have their bytes in their places of ``into`` now."""
        if self._threads is None:
            return [piece for piece in pieces if not self.fill(piece, into)]
        there = self._threads.map(lambda piece: self.fill(piece, into), pieces, [piece.size_bytes for piece in pieces])
        return [piece for piece, is_there in zip(pieces, there, strict=True) if not is_there]

    def fill(self, piece: Piece, into: Segment) -> bool:
        """Returns whether ``into`` has the bytes of ``piece`` in their place now."""
        base = address_of(into.memory) + piece.offset_bytes
        is_there = (piece.offset_bytes, piece.size_bytes, piece.expected) in self._in_place
        if is_there and (self._trusts or digest_of(base, piece.size_bytes) == piece.expected):
            return True
        at = self._beside.get((piece.expected, piece.size_bytes))
        if at is None or self._segment is None:
            return self._apply_delta(piece, base)
        return copy_and_digest(base, address_of(self._segment.memory) + at, piece.size_bytes, of_source=False) == piece.expected

    def _apply_delta(self, piece: Piece, into: int) -> bool:
        part = None if self._delta is None else self._delta.parts.get((piece.expected, piece.size_bytes))
        if self._delta is None or part is None:
            return False
        at = self._beside.get((part.base, piece.size_bytes))
        if (piece.offset_bytes, piece.size_bytes, part.base) in self._in_place:
            base = into
        elif at is not None and self._segment is not None:
            base = address_of(self._segment.memory) + at
        else:
            return self._refuse(piece, "this pod has not the elements before the update")
        try:
            self._delta.apply(part, base, into)
        except ValueError as error:
            return self._refuse(piece, str(error))
        return True

    def _refuse(self, piece: Piece, why: str) -> bool:
        self.whole.append(f"{piece.name}: {why}")
        logger.warning("tensor %s is read whole: %s", piece.name, why)
        return False


NOTHING_HERE = LocalParts(None)
