"""Reads an announced version before it is published: parts come to the free buffer as soon as the trainer has written them. No torch.

What has come is a cache. When the version is published, every part is taken whose announced digest is that of the manifest, and its bytes are compared with it
as those of any other; the rest is read then. If it is never published, or the trainer registers something else, what has come is forgotten.
"""

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tandem.runtime.coordination.store import Store, WatchTimeout
from tandem.runtime.process.deadline import LOOK_S, Deadline
from tandem.runtime.rpc.calls import CallError
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.weight_transfer.announcement import KEY, Announcement, Place, announced
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.announced_parts import places_of, ready_of
from tandem.weight_transfer.transport.local_parts import LocalParts
from tandem.weight_transfer.transport.pieces import Piece, SourceLost, SourceStuck
from tandem.weight_transfer.transport.tcp_source import Buckets, TcpSource

logger = logging.getLogger(__name__)

BUCKET_BYTES = 4 * 2**20
"""Smaller than of published weights: what was asked for is awaited when they are published."""
_WATCH_S, _FINISH_S, _END_S = 0.5, 2.0, 15.0
_PAUSES_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """What has come to ``segment`` of a version that was announced: ``pieces``, whose ``expected`` are the announced digests, all or the first bytes of each,
    and those that were there already (``here``). ``early_bytes`` had come when it was published."""

    segment: Segment
    pieces: Sequence[Piece] = ()
    here: Sequence[Piece] = ()
    early_bytes: int = 0

    def hand_over(self, wanted: Sequence[Piece]) -> list[Piece]:
        """Returns those of the published pieces ``wanted`` that were not here, each with what has come of it."""
        here, came = {_key(piece) for piece in self.here}, {_key(piece): piece for piece in self.pieces}
        left = [piece for piece in wanted if _key(piece) not in here]
        for piece in left:
            if (before := came.get(_key(piece))) is not None:
                piece.go_on(before)
        return left


def _key(piece: Piece) -> tuple[int, int, str]:
    return piece.offset_bytes, piece.size_bytes, piece.expected


@dataclass(frozen=True, slots=True)
class Begun:
    """How an announced version is read: from ``source``, to ``into``; ``follower``: what tells of parts; ``here``: what this pod has of it."""

    source: TcpSource
    follower: TcpSource
    into: Segment
    here: LocalParts


class EarlyReading:
    """``version`` of the run's ``store``, read by threads from its announcement on, until ``finish`` or ``end``. ``begin``: chooses where it is read from and
    to; raises ``RunError`` if it cannot be read early. ``patience_s``: how long attempts may bring no byte."""

    def __init__(self, store: Store, version: WeightVersion, begin: Callable[[Announcement], Begun], deadline: Deadline, patience_s: float) -> None:
        self._store, self.version, self._begin, self._deadline, self._patience_s = store, version, begin, deadline, patience_s
        self._lock, self._is_ended = threading.Lock(), False
        self._begun: Begun | None = None
        self._queue, self._pieces, self._here = _Waiting(), list[Piece](), list[Piece]()
        self._threads = [threading.Thread(target=self._run, name="early-weights", daemon=True)]
        self._threads[0].start()

    def finish(self, published: Sequence[Piece], deadline: Deadline, tell: Callable[[int], object]) -> Arrived | None:
        """Called when the version is ``published``: lets the connections receive what is left, as long as they can and until ``deadline``, and returns what has
        come, as ``end``. ``tell``: receives the bytes that have come, from time to time."""
        with self._lock:
            self._is_ended = self._begun is None
        of = {_key(piece) for piece in published}
        early_bytes = sum(piece.done_bytes for piece in list(self._pieces) if _key(piece) in of)
        while self._begun is not None and self._is_alive() and not deadline.passed:
            for thread in list(self._threads):
                thread.join(LOOK_S)
            tell(self._done_bytes())
        arrived = self.end()
        return None if arrived is None else replace(arrived, early_bytes=early_bytes)

    def end(self) -> Arrived | None:
        """Asks for nothing more, waits for what was asked for, and returns what has come; ``None`` if nothing was written. Raises ``SourceStuck`` if a thread
        does not end, and might still write."""
        with self._lock:
            # One that still waits for the announcement touches nothing from here on.
            self._is_ended, begun = True, self._begun
        if begun is None:
            return None
        self._queue.close()
        finishes, ends = Deadline(_FINISH_S), Deadline(_END_S)
        while self._is_alive():
            begun.follower.abort()
            if finishes.passed:
                begun.source.abort()
            if ends.passed:
                raise SourceStuck(f"weights {describe(self.version)} are still read early; the memory that they are written to is not used again")
            time.sleep(0.001)
        return Arrived(begun.into, self._pieces, self._here)

    def close(self) -> None:
        """Ends, and returns when no thread uses the store any more."""
        self.end()
        self._threads[0].join(2 * _WATCH_S)

    def _is_alive(self) -> bool:
        # The first one starts the others.
        return self._threads[0].is_alive() or any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            announcement = self._wait()
            with self._lock:
                if announcement is None or self._is_ended:
                    return
                begun = self._begun = self._begin(announcement)
            for number in range(begun.source.connections):
                self._threads.append(threading.Thread(target=self._receive, args=(begun, announcement), name=f"early-weights-{number}", daemon=True))
                self._threads[-1].start()
            self._again(lambda: self._follow(begun, announcement))
            self._queue.finish()
        except (RunError, CallError, TimeoutError, OSError, struct.error, IndexError) as error:
            logger.info("weights %s are not read on before they are published: %s", describe(self.version), error)
            self._queue.close()

    def _wait(self) -> Announcement | None:
        """Returns the announcement of the version; ``None`` if none comes before the end."""
        while not (self._is_ended or self._deadline.passed):
            found, revision = announced(self._store)
            if found is not None and found.version == self.version:
                return found
            try:
                self._store.watch(KEY, revision, min(_WATCH_S, self._deadline.left_s()))
            except WatchTimeout:
                continue
        return None

    def _follow(self, begun: Begun, announcement: Announcement) -> None:
        """Lets every part be received when it is ready. Read again from the beginning after a broken connection, as it is told again what is ready."""
        seen, table = {(piece.offset_bytes, piece.size_bytes) for piece in (*self._pieces, *self._here)}, list[Place]()
        for frame in begun.follower.follow(announcement.segment, announcement.contents, self._deadline):
            table = places_of(frame.blobs["places"]) if "places" in frame.blobs else table
            fresh = [
                Piece("a part that was announced", *table[number], digest)
                for number, digest in ready_of(frame.blobs.get("ready", b""))
                if table[number] not in seen and sum(table[number]) <= begun.into.size_bytes
            ]
            seen |= {(piece.offset_bytes, piece.size_bytes) for piece in fresh}
            missing = begun.here.missing(fresh, begun.into)
            left = set(map(id, missing))
            self._here += [piece for piece in fresh if id(piece) not in left]
            self._pieces += missing
            self._queue.add(missing)

    def _receive(self, begun: Begun, announcement: Announcement) -> None:
        def drain() -> None:
            begun.source.drain(self._queue, announcement.segment, announcement.contents, begun.into.memory, self._deadline)

        try:
            self._again(drain)
        except (RunError, CallError, TimeoutError, OSError) as error:
            logger.info("weights %s are read on when they are published: %s", describe(self.version), error)
            self._queue.close()

    def _again(self, attempt: Callable[[], None]) -> None:
        """Makes ``attempt`` again after each broken connection, until nothing has come for ``patience_s`` or this is ended."""
        patience, pause_s = None, _PAUSES_S[0]
        while not self._queue.is_closed:
            before = self._done_bytes()
            try:
                attempt()
                return
            except SourceLost as loss:
                if patience is None or self._done_bytes() > before:
                    patience, pause_s = Deadline(self._patience_s, self._deadline), _PAUSES_S[0]
                if patience.passed:
                    raise TimeoutError(f"{loss}, and nothing came for {self._patience_s:g} s") from None
            self._queue.rest(pause_s)
            pause_s = min(_PAUSES_S[1], 2 * pause_s)

    def _done_bytes(self) -> int:
        return sum(piece.done_bytes for piece in list(self._pieces))


class _Waiting(Buckets):
    """Pieces that are ready and that no connection has yet. Others may follow until it is ``finished``; none are given out when it is ``closed``."""

    def __init__(self) -> None:
        super().__init__(())
        self._ready, self._changed = deque[Piece](), threading.Condition()
        self._is_finished = self.is_closed = False

    def __len__(self) -> int:
        return len(self._ready)

    def take(self, *, waits: bool) -> list[Piece] | None:
        with self._changed:
            while waits and not (self._ready or self._is_finished or self.is_closed):
                self._changed.wait()
            if self.is_closed:
                return None
            bucket = list[Piece]()
            while self._ready and sum(piece.missing[1] for piece in bucket) < BUCKET_BYTES:
                bucket.append(self._ready.popleft())
            return bucket or None

    def give_back(self, buckets: Iterable[list[Piece]]) -> None:
        with self._changed:
            self._ready.extendleft(piece for bucket in reversed(list(buckets)) for piece in reversed(bucket))

    def add(self, pieces: Sequence[Piece]) -> None:
        with self._changed:
            self._ready.extend(pieces)
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def rest(self, seconds: float) -> None:
        """Sleeps, until it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, seconds)
