"""Reads one version from several pods at once: every sender's connections take the next parts from one queue, so that each sends as much as it can."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tandem.runtime.process.deadline import Deadline
from tandem.types.errors import RunError
from tandem.weight_transfer.shared_memory import Contents
from tandem.weight_transfer.transport.pieces import BUCKET_BYTES, Piece, SourceLost
from tandem.weight_transfer.transport.tcp_source import Buckets, TcpSource

logger = logging.getLogger(__name__)

_BUCKETS_EACH, _LEAST_BYTES = 4, 256 * 1024
_LONG_S, _LONG_FACTOR = 2.0, 2.0
"""A sender that goes on for so long, and so many times as long as the first one that found nothing left to send, is too slow."""


@dataclass(frozen=True, slots=True)
class Sender:
    """A pod that has the version in ``segment``."""

    source: TcpSource
    segment: str


class SeveralSenders:
    """A ``Source`` over ``peers``, and over ``origin``, the pod that the weights were trained in, when no peer is left.

    A peer is left out when its connection breaks, when it holds other weights by now, when a part that it sent does not have its digest, and when it still
    sends long after another has sent its last part. What it has sent is kept; the rest comes from the others.
    """

    def __init__(self, peers: Sequence[Sender], origin: Sender) -> None:
        self._peers, self._origin = list(peers), origin

    def read(self, segment: str, contents: Contents, pieces: Sequence[Piece], into: memoryview, deadline: Deadline) -> None:
        """See ``Source.read``. ``segment`` is that of the origin; each peer has its own."""
        altered = {sender for piece in pieces for sender in piece.altered_by}
        for peer in [peer for peer in self._peers if peer.source.peer in altered]:
            self._leave_out(peer, "it sent a part that does not have its digest")
        while self._peers:
            left = [piece for piece in pieces if not piece.is_complete]
            if not left:
                return
            each = [peer for peer in self._peers for _ in range(peer.source.connections)]
            # Small enough that a fast sender takes more of them than a slow one.
            limit_bytes = sum(piece.missing[1] for piece in left) // (_BUCKETS_EACH * len(each))
            queue = Buckets(left, min(BUCKET_BYTES, max(_LEAST_BYTES, limit_bytes)))
            with ThreadPoolExecutor(len(each), thread_name_prefix="weights") as pool:
                ended = [(peer, pool.submit(peer.source.drain, queue, peer.segment, contents, into, deadline)) for peer in each]
                _wait(ended)
            for peer, future in ended:
                error = future.exception()
                if isinstance(error, SourceLost | RunError) and peer in self._peers:
                    self._leave_out(peer, str(error))
                elif error is not None and not isinstance(error, SourceLost | RunError):
                    raise error
        self._origin.source.read(self._origin.segment, contents, [piece for piece in pieces if not piece.is_complete], into, deadline)

    def _leave_out(self, peer: Sender, why: str) -> None:
        self._peers.remove(peer)
        logger.warning("%s sends no more of these weights: %s", peer.source.peer, why)

    def close(self) -> None:
        for sender in (*self._peers, self._origin):
            sender.source.close()


def _wait(ended: Sequence[tuple[Sender, "Future[None]"]]) -> None:
    """Waits for the connections of all senders, and breaks those of a sender that is much slower than the first whose connections have all ended well."""
    began, futures = time.monotonic(), [future for _, future in ended]
    wait(futures, return_when=FIRST_COMPLETED)
    first_s: float | None = None
    while any(not future.done() for future in futures):
        busy = {sender.source.peer for sender, future in ended if not future.done()}
        if first_s is None and any(future.done() and future.exception() is None and sender.source.peer not in busy for sender, future in ended):
            first_s = time.monotonic() - began
        if first_s is not None and time.monotonic() - began > max(first_s + _LONG_S, _LONG_FACTOR * first_s):
            for sender, future in ended:
                if not future.done():
                    sender.source.abort()
        wait(futures, timeout=0.05)
