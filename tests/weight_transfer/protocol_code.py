"""The weights' protocol as the code has it, for a walk over its states: a store in memory, manifests and digests, labels, the choice of a buffer, and the
pod's transitions. Results that depend on plain values alone are kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast

import xxhash

from tandem.pod.states import RolloutState, TrainerState
from tandem.pod.transitions import Transitions
from tandem.runtime.coordination.store import Conflict, Entry, Guard
from tandem.types import PartEntry, TensorEntry, WeightManifest, WeightVersion
from tandem.weight_transfer.announcement import Announcement, is_announced, write_note
from tandem.weight_transfer.delta import DeltaReference, publish_reference, reference_to
from tandem.weight_transfer.manifest import make_manifest, to_json
from tandem.weight_transfer.publication import KEY, current
from tandem.weight_transfer.shared_memory import Contents, Segment, WeightBuffers, contents_of, decode_label, encode_label
from tandem.weight_transfer.transport.early import Arrived
from tandem.weight_transfer.transport.pieces import Piece, pieces_of

TENSORS = ("a", "b")
Bytes = WeightVersion
"""The bytes of a tensor, named for the version that they belong to."""


class LooksAgain(Exception):
    """What ``publish`` does when somebody was faster: it reads the key again, which is a step of its own here."""


class MemoryStore:
    """The one key of a store, with the interface that ``publication`` uses. ``compares``: whether it compares before it swaps. With ``looked`` the next read
    returns what a step before has seen, here nothing, and a further one is a step of its own."""

    def __init__(self, entry: Entry | None, compares: bool = True, looked: Iterator[None] | None = None) -> None:
        self.entry, self._compares, self._looked = entry, compares, looked

    def get(self, key: str) -> Entry | None:
        if self._looked is None:
            return self.entry
        for nothing in self._looked:
            return nothing
        raise LooksAgain

    def compare_and_swap(self, key: str, expected_revision: int | None, value: bytes, lease: int | None = None, guard: Guard | None = None) -> int:
        if self._compares and (self.entry.revision if self.entry else None) != expected_revision:
            raise Conflict(key, expected_revision, self.entry)
        self.entry = Entry(key, value, (self.entry.revision if self.entry else 0) + 1)
        return self.entry.revision


@cache
def digest(name: str, content: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(bytes_of(name, content))


def bytes_of(name: str, content: Bytes) -> bytes:
    """Returns the 64 bytes of a tensor."""
    return f"{name} of {tuple(content)}".encode().ljust(64)


@cache
def manifest_of(version: WeightVersion, segment: str) -> WeightManifest:
    parts = [(PartEntry(0, (0,), (16,), digest(name, version)),) for name in TENSORS]
    return make_manifest(version, [TensorEntry(name, "float32", (16,), segment, 64 * i, 64, parts[i]) for i, name in enumerate(TENSORS)])


@cache
def value_of(version: WeightVersion, segment: str) -> bytes:
    return to_json(manifest_of(version, segment))


@cache
def read_manifest(version: WeightVersion, segment: str, revision: int) -> tuple[WeightManifest, int]:
    found = current(cast(Any, MemoryStore(Entry(KEY, value_of(version, segment), revision))))
    assert found is not None
    return found


@cache
def label_says(label: WeightVersion | None, wanted: WeightVersion) -> bool:
    """Returns whether a segment that was labelled with ``label`` is one of ``wanted``, by the bytes of the label."""
    if label is None:
        return False
    encoded = encode_label(Contents(label, manifest_of(label, "any").digest))
    return decode_label(encoded) == contents_of(manifest_of(wanted, "any"))


@cache
def is_in_early(version: WeightVersion, place: int, marked: Bytes, came: Bytes) -> bool:
    """Returns whether the tensor ``place`` of the published ``version`` needs not be read, because it was read early: marked as of ``marked``, the bytes
    ``came``."""
    wanted = pieces_of(manifest_of(version, "any"))
    early = Piece("it", wanted[place].offset_bytes, 64, digest(TENSORS[place], marked))
    early.arrived(memoryview(bytearray(early.offset_bytes) + bytes_of(TENSORS[place], came)), 64)
    left = Arrived(cast(Segment, None), [early]).hand_over(wanted)
    return all(piece.is_verified for piece in left if piece.offset_bytes == early.offset_bytes)


@cache
def note_says(note: tuple[WeightVersion, int] | None, version: WeightVersion, attempt: int) -> bool:
    """Returns whether a segment with the announcement ``note`` is one of ``version`` in its registration ``attempt``, by the bytes of the note."""
    if note is None:
        return False
    page = _Page(memoryview(bytearray(4096)))
    write_note(cast(Segment, page), Announcement(note[0], "any", 128, f"{note[1]:032x}", "board"))
    return is_announced(cast(Segment, page), Contents(version, f"{attempt:032x}"))


class _Page(NamedTuple):
    note: memoryview
    name: str = "any"


class _KeyStore:
    """One key, as ``publish_reference`` and ``reference_to`` use a store."""

    entry: Entry | None = None

    def get(self, key: str) -> Entry | None:
        return self.entry

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        self.entry = Entry(key, value, 1)
        return 1


@cache
def delta_leads_to(target: WeightVersion, wanted: WeightVersion) -> bool:
    """Returns whether a reader of ``wanted`` uses the delta that was made for ``target``."""
    store = cast(Any, _KeyStore())
    publish_reference(store, DeltaReference("any", 2, 1, "0" * 32, contents_of(manifest_of(target, "any"))))
    return reference_to(store, manifest_of(wanted, "any")) is not None


def segment_name(shim: int, place: int) -> str:
    return f"shim{shim}-weights-{place}"


def place_of(segment: str) -> tuple[int, int]:
    shim, _, place = segment.removeprefix("shim").partition("-weights-")
    return int(shim), int(place)


@cache
def free_buffer(shim: int, published: str | None) -> int:
    class Named(NamedTuple):
        name: str

    buffers = WeightBuffers(cast(tuple[Segment, Segment], (Named(segment_name(shim, 0)), Named(segment_name(shim, 1)))))
    return buffers.segments.index(buffers.other(published))


# -- the states of the figure -------------------------------------------------------------------------------------------


class _Unrecorded:
    """Records of a run that times and writes nothing."""

    @contextmanager
    def phase(self, *_: object) -> Iterator[dict[str, Any]]:
        yield {}


@cache
def trainer_goes(state: TrainerState, *through: TrainerState) -> TrainerState:
    """Returns the last state of ``through``; ``AssertionError``: the figure has no such way."""
    transitions = Transitions(cast(Any, _Unrecorded()), trainer=state)
    for each in through:
        transitions.trainer_enters(each, 0)
    return transitions.trainer


@cache
def rollout_goes(state: RolloutState, *through: RolloutState) -> RolloutState:
    transitions = Transitions(cast(Any, _Unrecorded()), rollout=state)
    for each in through:
        transitions.rollout_enters(each, 0)
    return transitions.rollout
