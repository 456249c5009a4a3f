"""Reads the weights of a version from another pod, whatever carries them: goes on after broken connections, verifies every part, and reads a part
again whose bytes were altered on the way. No torch."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.runtime.process.deadline import LOOK_S, Deadline
from tandem.runtime.rpc.calls import PeerDied
from tandem.types.errors import DamagedWeights
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Contents, Segment, contents_of
from tandem.weight_transfer.transport.early import Arrived
from tandem.weight_transfer.transport.local_parts import NOTHING_HERE, LocalParts
from tandem.weight_transfer.transport.pieces import Piece, Source, SourceLost, pieces_of

logger = logging.getLogger(__name__)

_PAUSES_S = 0.05, 1.0
"""Between two attempts that bring no byte: at first, and at most."""


class Fetched(NamedTuple):
    """What a transfer needed: the parts that were read again because their bytes had been altered, how often a connection broke, and the bytes of the parts
    that came from the other pod, each counted once."""

    rereads: tuple[str, ...]
    breaks: int
    size_bytes: int = 0


def fetch(
    source: Source, manifest: WeightManifest, segment: str, into: Segment, here: LocalParts = NOTHING_HERE, *, peer: str, deadline: Deadline,
    patience_s: float = 10.0, on_progress: Callable[[int, int], None] = lambda done, total: None, early: Arrived | None = None,
) -> Fetched:  # fmt: skip
    """Reads every part of ``manifest`` that is not ``here`` from ``segment`` of the pod ``peer`` to the same offsets of ``into``, whose label it sets when all
    are verified.

    ``patience_s``: how long attempts may bring no byte before the other pod counts as dead. ``on_progress``: receives the verified and all bytes,
    after each attempt. ``early``: what has come to ``into`` before the manifest was published, of which parts with its digests are not read again.

    Raises:
        VersionMoved: the other pod holds another version now; ``into`` holds nothing.
        DamagedWeights: a part had another digest than the manifest's both times that it was read from the same pod.
        PeerDied: no byte came for ``patience_s``, however often the connection was made again.
        TimeoutError: past ``deadline``.
    """
    into.contents = None
    wanted, pieces = contents_of(manifest), pieces_of(manifest)
    left = pieces if early is None else early.hand_over(pieces)
    # What has come must not be written to again.
    left = [piece for piece in left if piece.done_bytes] + here.missing([piece for piece in left if not piece.done_bytes], into)
    fetched_bytes = sum(piece.size_bytes for piece in left)
    left = [piece for piece in left if not piece.is_verified]

    def is_repeated(piece: Piece) -> bool:
        if piece.sender in piece.altered_by:
            raise DamagedWeights(
                f"tensor {piece.name} of weights {describe(manifest.version)} was received twice and does not have its digest {piece.expected}; "
                "the weights of the other pod are damaged"
            )
        logger.warning("tensor %s of weights %s arrived without its digest; it is read again", piece.name, describe(manifest.version))
        return True

    def tell(missing: Sequence[Piece]) -> None:
        on_progress(manifest.size_bytes - sum(piece.size_bytes for piece in missing), manifest.size_bytes)

    rereads, breaks = read_pieces(source, segment, wanted, left, into.memory, is_repeated, peer=peer, deadline=deadline, patience_s=patience_s, tell=tell)
    into.contents = wanted
    return Fetched(rereads, breaks, fetched_bytes)


def read_pieces(
    source: Source, segment: str, contents: Contents, pieces: Sequence[Piece], memory: memoryview, is_repeated: Callable[[Piece], bool], *, peer: str,
    deadline: Deadline, patience_s: float, tell: Callable[[Sequence[Piece]], None] = lambda missing: None,
) -> tuple[tuple[str, ...], int]:  # fmt: skip
    """Reads ``pieces`` from ``segment``, which holds ``contents``, to the same offsets of ``memory``, until all have their digests. Returns the names of
    those that arrived with another one and were read again, and how often a connection broke. ``is_repeated``: whether such a one is, or it is given up.
    ``tell``: receives what is missing after each attempt. Arguments and errors beside those as of ``fetch``."""
    left, breaks, rereads = list(pieces), 0, list[str]()
    patience, pause_s = Deadline(patience_s, deadline), _PAUSES_S[0]
    while left:
        before = sum(piece.done_bytes for piece in left)
        try:
            source.read(segment, contents, left, memory, deadline)
        except SourceLost as loss:
            breaks += 1
            is_progress = sum(piece.done_bytes for piece in left) > before
            if not is_progress and patience.passed:
                raise PeerDied(peer, "receive_weights", f"{loss}, and nothing came for {patience_s:g} s") from None
            logger.warning("%s; reading on (%d bytes are missing)", loss, sum(piece.missing[1] for piece in left))
            if is_progress:
                patience, pause_s = Deadline(patience_s, deadline), _PAUSES_S[0]
            else:
                _sleep(pause_s, deadline)
                pause_s = min(_PAUSES_S[1], 2 * pause_s)
        left = [piece for piece in left if not piece.is_verified]
        for piece in [piece for piece in left if piece.is_complete]:
            if is_repeated(piece):
                rereads.append(piece.name)
                piece.altered_by.add(piece.sender)
                piece.restart()
            else:
                left.remove(piece)
        tell(left)
    return tuple(rereads), breaks


def _sleep(seconds: float, within: Deadline) -> None:
    """Sleeps, and looks at the clock: a process that does not for a second counts as paused, and its deadlines begin anew."""
    pause = Deadline(seconds, within)
    while (left := pause.left_s()) > 0:
        time.sleep(min(left, LOOK_S))
