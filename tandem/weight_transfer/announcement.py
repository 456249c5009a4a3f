"""The announcement of a version that is being registered: which parts of it are ready, so that other pods can begin to read them. No torch.

It is no publication. Nothing that is read early is used before a manifest is published, with whose digests all of it is compared; an announcement whose trainer
has died announces nothing that anybody could take for a version. The store has one small key, which names the segment that is written. What changes with every
part is in shared memory: behind the label of that segment is the note of the announcement, and the note names a board, which has the place of every part and a
mark for each that is ready, with its digest. A writer removes the note before the label, and that before it changes the first byte.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import xxhash

from tandem.runtime.coordination.store import Store
from tandem.types.sample import WeightVersion
from tandem.weight_transfer.shared_memory import Contents, Segment

KEY = "weights/announced"
_NOTE, _NOTE_MAGIC = struct.Struct("<4sHQ"), b"TDMN"
_HEAD, _HEAD_MAGIC = struct.Struct("<4sI16s"), b"TDMB"
_PLACE, _MARK, _CHECK = struct.Struct("<QQ"), struct.Struct("<16sQ"), struct.Struct("<16s16sI")


class Place(NamedTuple):
    """Where a part is in its segment."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """``version`` is being written to the first ``size_bytes`` of ``segment``. ``attempt``: 32 hexadecimal digits of this registration of it, as no other has;
    ``board``: the segment of its marks, empty for a reader of another pod."""

    version: WeightVersion
    segment: str
    size_bytes: int
    attempt: str
    board: str = ""

    @property
    def contents(self) -> Contents:
        """What a reader asks for: like that of a label, with the attempt in the place of the manifest's digest, which is not known yet."""
        return Contents(self.version, self.attempt)


def new_attempt() -> str:
    return os.urandom(16).hex()


def announce(store: Store, announcement: Announcement) -> None:
    """Tells other pods of ``announcement``. The next one, or a publication of its version, supersedes it."""
    plain = {**asdict(announcement), "version": list(announcement.version)}
    del plain["board"]
    store.put(KEY, json.dumps(plain, separators=(",", ":")).encode("ascii"))


def announced(store: Store) -> tuple[Announcement | None, int]:
    """Returns the newest announcement and its revision; ``None`` and 0 if there is none, ``None`` if its key is damaged."""
    entry = store.get(KEY)
    if entry is None:
        return None, 0
    try:
        plain = json.loads(entry.value)
        incarnation, step = plain["version"]
        version = WeightVersion(int(incarnation), int(step))
        return Announcement(version, str(plain["segment"]), int(plain["size_bytes"]), str(plain["attempt"])), entry.revision
    except (ValueError, KeyError, TypeError):
        return None, entry.revision


def write_note(segment: Segment, announcement: Announcement | None) -> None:
    """Makes ``announcement`` the one of ``segment``; ``None``: it has none. Called by the one that directs the writers."""
    if announcement is None:
        segment.note[: _NOTE.size] = bytes(_NOTE.size)
        return
    text = json.dumps([*announcement.version, announcement.size_bytes, announcement.attempt, announcement.board]).encode("ascii")
    segment.note[_NOTE.size : _NOTE.size + len(text)] = text
    segment.note[: _NOTE.size] = _NOTE.pack(_NOTE_MAGIC, len(text), xxhash.xxh3_64_intdigest(text))


def read_note(segment: Segment) -> Announcement | None:
    """Returns the announcement of ``segment``; ``None`` if it has none, and where it was read while it changed."""
    note = bytes(segment.note)
    if len(note) < _NOTE.size:
        return None
    magic, size, digest = _NOTE.unpack_from(note)
    text = note[_NOTE.size : _NOTE.size + size]
    if magic != _NOTE_MAGIC or xxhash.xxh3_64_intdigest(text) != digest:
        return None
    incarnation, step, size_bytes, attempt, board = json.loads(text)
    return Announcement(WeightVersion(incarnation, step), segment.name, size_bytes, attempt, board)


def is_announced(segment: Segment, contents: Contents) -> bool:
    """Returns whether ``segment`` has the announcement with ``contents``: what is marked as ready is in it."""
    note = read_note(segment)
    return note is not None and note.contents == contents


def board_bytes(count: int) -> int:
    """Returns the bytes of the board of ``count`` parts."""
    return _HEAD.size + count * (_PLACE.size + _MARK.size)


class Board:
    """The board in ``memory`` of the registration ``attempt``. Several ranks mark their parts on it, each its own. A mark of another attempt, or one that is
    read while it is written, is none."""

    def __init__(self, memory: memoryview, attempt: str) -> None:
        self._memory, self._attempt = memory, bytes.fromhex(attempt)
        self._known: dict[int, str] = {}
        self._seen = b""

    def begin(self, places: Sequence[Place]) -> None:
        """Writes the ``places`` of all parts, of which none is ready."""
        self._memory[: _HEAD.size] = bytes(_HEAD.size)
        table = b"".join(_PLACE.pack(*place) for place in places)
        self._memory[_HEAD.size : _HEAD.size + len(table)] = table
        self._memory[: _HEAD.size] = _HEAD.pack(_HEAD_MAGIC, len(places), self._attempt)

    def mark(self, index: int, digest: str) -> None:
        """Part ``index`` is written, and has ``digest``."""
        raw, at = bytes.fromhex(digest), self._marks_at(self._count()) + index * _MARK.size
        self._memory[at : at + _MARK.size] = _MARK.pack(raw, self._check(raw, index))

    def places(self) -> list[Place]:
        """Returns the place of every part; empty if the board is of another attempt."""
        count = self._count()
        table = self._memory[_HEAD.size : self._marks_at(count)]
        return [Place(*each) for each in _PLACE.iter_unpack(table)]

    def ready(self) -> Mapping[int, str]:
        """Returns the digests of the parts that are ready, by their index."""
        count = self._count()
        marks = bytes(self._memory[self._marks_at(count) : self._marks_at(count) + count * _MARK.size])
        if marks != self._seen:
            for index, (digest, check) in enumerate(_MARK.iter_unpack(marks)):
                if index not in self._known and check == self._check(digest, index):
                    self._known[index] = digest.hex()
            self._seen = marks
        return self._known

    def _count(self) -> int:
        magic, count, attempt = _HEAD.unpack_from(self._memory)
        is_ours = magic == _HEAD_MAGIC and attempt == self._attempt and board_bytes(count) <= len(self._memory)
        return int(count) if is_ours else 0

    def _marks_at(self, count: int) -> int:
        return _HEAD.size + count * _PLACE.size

    def _check(self, digest: bytes, index: int) -> int:
        return int(xxhash.xxh3_64_intdigest(_CHECK.pack(self._attempt, digest, index)))
