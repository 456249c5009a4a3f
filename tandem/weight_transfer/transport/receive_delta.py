"""Brings the file of an element-wise delta from another pod: like weights, it is read on after broken connections, and a part that was altered on the way is
read again. Whatever is wrong with it in the end, the weights are read whole. No torch."""

import logging
from collections.abc import Callable
from dataclasses import replace

from tandem.runtime.process.deadline import Deadline
from tandem.types.errors import RunError
from tandem.weight_transfer.delta import Delta, DeltaReference
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.fetch import read_pieces
from tandem.weight_transfer.transport.pieces import Piece, Source

logger = logging.getLogger(__name__)


def receive_delta(
    source: Source, reference: DeltaReference, begin: Callable[[int], Segment], *, peer: str, deadline: Deadline, patience_s: float
) -> Delta:
    """Reads the file of ``reference`` to the segment that ``begin`` returns for its size, and labels it. Returns it as it is there. Parts that do not have
    their digests were not to be had: ``Delta`` compares them. Raises ``RunError``, ``CallError`` and ``TimeoutError`` if the file is not to be had."""
    segment = begin(reference.size_bytes)
    version = describe(reference.target.version)

    def is_repeated(piece: Piece) -> bool:
        is_first = piece.sender not in piece.altered_by
        logger.warning("%s %s arrived without its digest; %s", piece.name, version, "it is read again" if is_first else "it is not used")
        return is_first

    def read(pieces: list[Piece]) -> None:
        read_pieces(source, reference.segment, reference.contents, pieces, segment.memory, is_repeated, peer=peer, deadline=deadline, patience_s=patience_s)

    read([Piece("the index of the delta to weights", 0, reference.index_bytes, reference.digest)])
    try:
        delta = Delta(reference, segment.memory)
    except (ValueError, TypeError) as error:
        raise RunError(str(error)) from None
    read([
        Piece(f"part {number} of the delta to weights", reference.index_bytes + part.offset_bytes, part.size_bytes, part.digest)
        for number, part in enumerate(delta.parts.values())
    ])  # fmt: skip
    segment.contents = reference.contents
    return Delta(replace(reference, segment=segment.name), segment.memory)
