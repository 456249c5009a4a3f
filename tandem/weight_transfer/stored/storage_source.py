"""Reads weights from object storage: the newest version, the element-wise delta that leads to it, and any part of it by the chain of files down to an anchor.
No torch."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import xxhash

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.temporary import temporary_folder
from tandem.storage.files import Storage, service_errors
from tandem.types.errors import RunError
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.copying import address_of
from tandem.weight_transfer.delta import Delta, DeltaReference, EncodedPart
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Contents, Segment, contents_of
from tandem.weight_transfer.stored.stored_file import (
    FIXED_BYTES,
    WANTED,
    StoredDamage,
    StoredVersion,
    decode_header,
    header_bytes,
    name_of,
    parse_name,
)
from tandem.weight_transfer.transport.pieces import Piece, SourceLost

logger = logging.getLogger(__name__)
_LOOK_S = 0.1
_READ_BYTES = 8 * 2**20


class StoredWeights:
    """The files of ``storage``. Headers that were read are kept, as long as their files are there."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._headers: dict[str, StoredVersion] = {}
        self._delta: tuple[str, bytes] = ("", b"")

    @property
    def url(self) -> str:
        return self.storage.url

    def newest(self) -> StoredVersion | None:
        """Returns the newest version; ``None`` if there is none. Raises ``RunError`` where the storage does not answer, and ``StoredDamage``."""
        names = [file.name for file in self.storage.files()]
        parsed = [(found, name) for name in names if (found := parse_name(name)) is not None]
        self._headers = {name: header for name, header in self._headers.items() if name in names}
        return self._header(max(parsed)[1]) if parsed else None

    def of(self, wanted: Contents) -> StoredVersion:
        """Returns the file of ``wanted``: the anchor if it has one. Raises ``FileNotFoundError`` if there is none, or it is of other weights, and
        ``StoredDamage``."""
        for is_anchor in (True, False):
            try:
                header = self._header(name_of(wanted.version, is_anchor=is_anchor))
            except FileNotFoundError:
                continue
            if contents_of(header.manifest) == wanted:
                return header
        raise FileNotFoundError(f"'{self.url}' has no weights {describe(wanted.version)} with the digest {wanted.digest}")

    def wait_for(self, wanted: Contents, deadline: Deadline) -> None:
        """Waits until the run has written ``wanted``. Raises ``FileNotFoundError`` if it has not at the ``deadline``, and what the storage's error is."""
        while True:
            try:
                self.of(wanted)
                return
            except (FileNotFoundError, RunError) as error:
                if isinstance(error, StoredDamage) or (left := deadline.left_s()) <= 0:
                    raise
                time.sleep(min(_LOOK_S, left))

    def delta_to(self, wanted: Contents, begin: Callable[[int], Segment]) -> Delta | None:
        """Returns the encoded parts of the file of ``wanted`` in the segment that ``begin`` returns for their size; ``None`` if it is an anchor. Errors as of
        ``of``."""
        file = self.of(wanted)
        encoded = [part for part in file.parts.values() if part.base]
        if file.base is None or not encoded:
            return None
        index = json.dumps(encoded, separators=(",", ":")).encode("ascii")
        payload = self._payload(file)
        segment = begin(len(index) + len(payload))
        segment.memory[: len(index)] = index
        segment.memory[len(index) : len(index) + len(payload)] = payload
        reference = DeltaReference(segment.name, len(index) + len(payload), len(index), str(xxhash.xxh3_128_hexdigest(index)), wanted)
        segment.contents = reference.contents
        try:
            return Delta(reference, segment.memory)
        except ValueError as error:
            raise StoredDamage(f"the file '{file.name}' of '{self.url}' cannot be used: {error}") from None

    def chain(self, wanted: Contents) -> Iterator[StoredVersion]:
        """Yields the file of ``wanted``, and those that it begins with, down to an anchor. Errors as of ``of``; ``StoredDamage`` names a file that is missing
        in the middle."""
        file = self.of(wanted)
        yield file
        while file.base is not None:
            try:
                before = self.of(file.base)
            except FileNotFoundError:
                raise StoredDamage(f"'{self.url}' has not the weights {describe(file.base.version)}, which '{file.name}' begins with") from None
            file = before
            yield file

    def read(self, file: StoredVersion, part: EncodedPart, into: memoryview) -> None:
        """Reads ``part`` of ``file`` to ``into``, and again if it does not have its digest. Raises ``StoredDamage`` if it has not then."""
        for _ in range(2):
            if file.base is not None:
                at = part.offset_bytes
                into[: part.size_bytes] = self._payload(file)[at : at + part.size_bytes].ljust(part.size_bytes, b"\0")
            else:
                with service_errors(self.url), self.storage.open(file.name) as opened:
                    opened.seek(file.payload_at + part.offset_bytes)
                    _fill(opened.read, into[: part.size_bytes])
            if xxhash.xxh3_128_hexdigest(into[: part.size_bytes]) == part.digest:
                return
            self._delta = ("", b"")
        raise StoredDamage(f"a part of the file '{file.name}' of '{self.url}' was read twice and does not have its digest {part.digest}")

    def ask_for_anchor(self, why: str) -> None:
        """Asks the run to write the next version whole. Where this reader may not write, the next anchor comes in its turn."""
        logger.warning("%s; the run is asked for whole weights", why)
        self._headers.clear()
        with temporary_folder() as folder:
            path = folder / WANTED
            path.write_text(why + "\n", encoding="utf-8")
            try:
                self.storage.put(WANTED, path)
            except (RunError, OSError) as error:
                logger.warning("'%s' cannot be written, so the next anchor is waited for: %s", self.url, error)

    def _header(self, name: str) -> StoredVersion:
        if name not in self._headers:
            with service_errors(self.url), self.storage.open(name) as file:
                fixed = file.read(FIXED_BYTES)
                header = bytearray(header_bytes(fixed, name))
                _fill(file.read, memoryview(header))
            self._headers[name] = decode_header(fixed, bytes(header), name)
        return self._headers[name]

    def _payload(self, file: StoredVersion) -> bytes:
        """Returns all parts of a delta, of which the last is kept."""
        if self._delta[0] != file.name:
            with service_errors(self.url), self.storage.open(file.name) as opened:
                opened.seek(file.payload_at)
                self._delta = (file.name, opened.read())
        return self._delta[1]


class StorageSource:
    """A ``Source`` over ``stored``: each part is found in the newest file of the chain that has it, and made of what that file begins with."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored

    def read(self, segment: str, contents: Contents, pieces: Sequence[Piece], into: memoryview, deadline: Deadline) -> None:
        """See ``Source.read``. Raises ``StoredDamage`` for a file that is missing or damaged, ``SourceLost`` where the storage does not answer or has not got
        the version yet."""
        try:
            chain = _Chain(self._stored.chain(contents))
            for piece in pieces:
                deadline.nap_s()
                piece.sender = self._stored.url
                piece.restart()
                at = piece.offset_bytes
                self._make(chain, piece, into[at : at + piece.size_bytes], contents)
                piece.arrived(into, piece.size_bytes)
        except (StoredDamage, TimeoutError):
            raise
        except (RunError, OSError) as error:
            raise SourceLost(f"the storage '{self._stored.url}' has not answered: {error}") from None

    def _make(self, chain: "_Chain", piece: Piece, out: memoryview, contents: Contents) -> None:
        """Brings a part to ``out``: the whole one that its encodings begin with, and what each of them makes of it."""
        encodings, wanted, after = list[tuple[StoredVersion, EncodedPart]](), piece.expected, 0
        while True:
            held = chain.find(wanted, piece.size_bytes, after)
            if held is None:
                raise StoredDamage(f"no file of '{self._stored.url}' has {piece.name} of weights {describe(contents.version)}, or what it begins with")
            after, file, part = held
            if not part.base:
                self._stored.read(file, part, out)
                break
            encodings.append((file, part))
            wanted, after = part.base, after + 1
        address = address_of(out)
        for file, part in reversed(encodings):
            encoded = bytearray(part.size_bytes)
            self._stored.read(file, part, memoryview(encoded))
            try:
                made = elementwise.apply(memoryview(encoded), address, address, part.part_bytes, part.item_bytes)
            except ValueError as error:
                raise StoredDamage(f"{piece.name} in the file '{file.name}' of '{self._stored.url}' cannot be used: {error}") from None
            if made != part.target:
                raise StoredDamage(f"what the file '{file.name}' of '{self._stored.url}' makes of {piece.name} does not have its digest")

    def close(self) -> None:
        """Holds nothing open."""


class _Chain:
    """The files of a version, of which only those are opened that are needed."""

    def __init__(self, files: Iterator[StoredVersion]) -> None:
        self._left, self._files = files, list[StoredVersion]()

    def find(self, target: str, size_bytes: int, first: int) -> tuple[int, StoredVersion, EncodedPart] | None:
        """Returns the newest file from number ``first`` on that has a part, with its number, and the part."""
        number = first
        while True:
            while number >= len(self._files):
                following = next(self._left, None)
                if following is None:
                    return None
                self._files.append(following)
            part = self._files[number].parts.get((target, size_bytes))
            if part is not None:
                return number, self._files[number], part
            number += 1


def _fill(read: Callable[[int], bytes], out: memoryview) -> None:
    """Reads until ``out`` is full, or the file ends: then the rest is zeros, which have no digest of a part."""
    at = 0
    while at < len(out):
        data = read(min(_READ_BYTES, len(out) - at))
        if not data:
            out[at:] = bytes(len(out) - at)
            return
        out[at : at + len(data)] = data
        at += len(data)

