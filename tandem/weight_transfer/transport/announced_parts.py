"""What a server of weights knows of announced versions: which parts may be sent before they are published. No torch."""

import bisect
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.channel import Channel
from tandem.types.errors import RunError
from tandem.types.wire import Buffer
from tandem.weight_transfer.announcement import Announcement, Board, Place, read_note
from tandem.weight_transfer.shared_memory import Contents, Segment

PLACE, READY = struct.Struct("<QQ"), struct.Struct("<I16s")
"""On the wire: where a part is; and that a part, by its number among the places, is ready with a digest."""
LOOK_S, LOOK_SHARE, TELL_S = 0.002, 0.1, 1.0
"""Between two looks at a board; the most of a core's time that they take; and the longest time in which a reader is told nothing."""


class _OpenBoard:
    """The board of ``announcement``, mapped."""

    def __init__(self, announcement: Announcement) -> None:
        """Raises ``FileNotFoundError`` if the trainer that made it has ended."""
        self.contents = announcement.contents
        self._segment = Segment.open(announcement.board)
        self._board = Board(self._segment.memory, announcement.attempt)
        self.places = self._board.places()
        self._lock = threading.Lock()
        self._order = sorted(range(len(self.places)), key=lambda number: self.places[number])
        self._starts = [self.places[number].offset_bytes for number in self._order]

    def news(self, told: Collection[int]) -> dict[int, str]:
        """Returns the digests of the parts that are ready and not among those that were ``told``, by their number."""
        with self._lock:
            ready = self._board.ready()
            return {} if len(ready) == len(told) else {number: digest for number, digest in ready.items() if number not in told}

    def are_ready(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Returns whether each of ``ranges`` (offset, bytes) is in one part that is ready."""
        with self._lock:
            ready = self._board.ready()
            return all(self._is_ready(offset, size, ready) for offset, size in ranges)

    def _is_ready(self, offset: int, size: int, ready: Mapping[int, str]) -> bool:
        at = bisect.bisect_right(self._starts, offset) - 1
        if at < 0 or offset < 0 or size < 0:
            return False
        place = self.places[self._order[at]]
        return self._order[at] in ready and offset + size <= place.offset_bytes + place.size_bytes

    def close(self) -> None:
        self._segment.close()


class AnnouncedParts:
    """The boards of the announcements of a server's segments, of which the newest of each segment is kept open."""

    def __init__(self) -> None:
        self._boards: dict[str, _OpenBoard] = {}
        self._lock = threading.Lock()

    def are_ready(self, segment: Segment, contents: Contents, ranges: Sequence[tuple[int, int]]) -> bool:
        """Returns whether ``segment`` has the announcement with ``contents``, and each of ``ranges`` is in a part of it that is ready."""
        board = self._of(segment, contents)
        return board is not None and board.are_ready(ranges)

    def tell(self, channel: Channel, segment: Segment, contents: Contents, silent_s: float) -> None:
        """Sends frames ``ready`` with the parts of the announcement with ``contents`` as they become ready: at once with those that are, and at least one in
        ``TELL_S``. The first has the ``places`` of all; the last, whose meta has ``is_all``, follows when all are ready. ``refused`` ends them too, when
        ``segment`` has another announcement or none."""
        told, last, places = set[int](), 0.0, True
        while True:
            board = self._of(segment, contents)
            if board is None:
                text = "what was announced is not being registered any more"
                return channel.send({"message": text, "moved": True}, kind="refused", deadline=Deadline(silent_s))
            began = time.monotonic()
            fresh = board.news(told)
            is_all = len(told) + len(fresh) == len(board.places)
            if fresh or is_all or began - last >= TELL_S:
                blobs: dict[str, Buffer] = {"ready": b"".join(READY.pack(number, bytes.fromhex(digest)) for number, digest in fresh.items())}
                if places:
                    blobs["places"] = b"".join(PLACE.pack(*place) for place in board.places)
                channel.send({"is_all": is_all}, blobs, kind="ready", deadline=Deadline(silent_s))
                told.update(fresh)
                last, places = began, False
            if is_all:
                return None
            time.sleep(max(LOOK_S, (time.monotonic() - began) / LOOK_SHARE))

    def _of(self, segment: Segment, contents: Contents) -> _OpenBoard | None:
        announcement = read_note(segment)
        if announcement is None or announcement.contents != contents:
            return None
        with self._lock:
            board = self._boards.get(segment.name)
            if board is None or board.contents != contents:
                try:
                    fresh = _OpenBoard(announcement)
                except (FileNotFoundError, RunError):
                    return None
                if board is not None:
                    board.close()
                board = self._boards[segment.name] = fresh
            return board

    def close(self) -> None:
        with self._lock:
            for board in self._boards.values():
                board.close()
            self._boards.clear()


def places_of(blob: Buffer) -> list[Place]:
    """Returns the places of a frame ``ready``. Raises ``struct.error``."""
    return [Place(*each) for each in PLACE.iter_unpack(blob)]


def ready_of(blob: Buffer) -> list[tuple[int, str]]:
    """Returns the parts of a frame ``ready``, each with its digest. Raises ``struct.error``."""
    return [(number, digest.hex()) for number, digest in READY.iter_unpack(blob)]
