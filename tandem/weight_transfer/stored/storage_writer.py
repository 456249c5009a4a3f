"""Writes each published version to object storage, from which far pods and servers read it: an anchor every so many versions, and between them deltas. No
torch.

A file is made while the version is in the buffers, and sent by a thread, so that training does not wait for the storage. Where that fails, the chain of
deltas has a gap: the next version is an anchor. Files before the last anchor but one are removed.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tandem.runtime.process.temporary import temporary_folder
from tandem.storage.files import Storage
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.delta import Delta, EncodedPart
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import Segment, contents_of
from tandem.weight_transfer.stored.stored_file import SEGMENT, WANTED, anchors, encode_header, name_of, parse_name
from tandem.weight_transfer.transport.pieces import pieces_of

logger = logging.getLogger(__name__)
MOST_WAITING = 2
"""Versions that wait for the storage. With one more all of them are given up, and an anchor follows when it is faster again."""
_CLOSE_S = 60.0
_COPY_BYTES = 2**20


class _Waiting(NamedTuple):
    version: WeightVersion
    name: str
    path: Path


class StorageWriter:
    """``segments``: the buffers of the published weights. ``full_every``: versions from one anchor to the next."""

    def __init__(self, storage: Storage, segments: Sequence[Segment], full_every: int) -> None:
        self._storage, self._segments, self._full_every = storage, {segment.name: segment for segment in segments}, full_every
        self._scratch = temporary_folder()
        self._folder = self._scratch.__enter__()
        self._before: WeightManifest | None = None
        self._since_anchor = 0
        self._is_broken = True
        self._is_checked = False
        self._waiting: deque[_Waiting] = deque()
        self._changed, self._is_closing, self._is_sending = threading.Condition(), False, False
        self._thread = threading.Thread(target=self._send_all, name="weights to the storage", daemon=True)
        self._thread.start()

    def write(self, manifest: WeightManifest, delta: Delta | None) -> int:
        """Makes the file of ``manifest``, which is in the buffers now, and lets it be sent. ``delta``: what leads to it from the version of the last call;
        ``None``: there is none. Returns the bytes of the file, 0 where the version was replaced while it was read. Raises ``RunError`` if the disk is
        full."""
        with self._changed:
            before, self._before = self._before, manifest
            is_broken, self._is_broken = self._is_broken, False
        is_anchor = is_broken or delta is None or before is None or before.version >= manifest.version or self._since_anchor + 1 >= self._full_every
        base = None if is_anchor or before is None else before
        name = name_of(manifest.version, is_anchor=base is None)
        path = self._folder / name
        try:
            is_whole = self._write_file(path, manifest, base, delta)
        except OSError as error:
            path.unlink(missing_ok=True)
            self._break()
            raise RunError(f"weights {describe(manifest.version)} cannot be written to '{path}' for the storage: {error.strerror or error}") from None
        if not is_whole:
            path.unlink(missing_ok=True)
            self._break()
            return 0
        self._since_anchor = 0 if base is None else self._since_anchor + 1
        size_bytes = path.stat().st_size
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                self._give_up(f"the storage '{self._storage.url}' is slower than the run")
                path.unlink(missing_ok=True)
                return 0
            self._waiting.append(_Waiting(manifest.version, name, path))
            self._changed.notify_all()
        return size_bytes

    def _write_file(self, path: Path, manifest: WeightManifest, base: WeightManifest | None, delta: Delta | None) -> bool:
        """Returns whether the version was in its buffer until all was written."""
        (segment_name,) = {entry.segment for entry in manifest.tensors}
        segment, contents = self._segments[segment_name], contents_of(manifest)
        held = set() if base is None else {(piece.expected, piece.size_bytes) for piece in pieces_of(base)}
        parts, payload, at = dict[tuple[str, int], EncodedPart](), list[memoryview](), 0
        for piece in pieces_of(manifest):
            key = (piece.expected, piece.size_bytes)
            if key in parts or key in held:
                continue
            encoded = None if base is None or delta is None else delta.parts.get(key)
            if encoded is not None and delta is not None and (encoded.base, encoded.part_bytes) in held:
                content = delta.encoding(encoded)
                parts[key] = encoded._replace(offset_bytes=at)
            else:
                content = segment.memory[piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
                parts[key] = EncodedPart(piece.expected, "", piece.size_bytes, 1, at, piece.size_bytes, piece.expected)
            payload.append(content)
            at += len(content)
        stored = replace(manifest, tensors=tuple(replace(entry, segment=SEGMENT) for entry in manifest.tensors))
        header = encode_header(stored, None if base is None else contents_of(base), list(parts.values()))
        with path.open("wb") as file:
            file.write(header)
            for content in payload:
                _write(file, content)
        # The trainer may have begun with the next version but one meanwhile.
        return segment.contents == contents

    def _send_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                next_one, self._is_sending = self._waiting.popleft(), True
            try:
                self._send(next_one)
            except Exception as error:
                with self._changed:
                    self._give_up(str(error))
            finally:
                next_one.path.unlink(missing_ok=True)
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()

    def _send(self, file: _Waiting) -> None:
        if not self._is_checked:
            self._check_empty(file.version)
            self._is_checked = True
        self._storage.put(file.name, file.path)
        names = [each.name for each in self._storage.files()]
        there = anchors(names)
        oldest = there[-2] if len(there) > 1 else None
        for name in names:
            parsed = parse_name(name)
            if oldest is not None and parsed is not None and parsed[0] < oldest:
                self._storage.remove(name)
        if WANTED in names:
            logger.warning("a reader of '%s' asks for whole weights, because it cannot use what is there; the next version is written whole", self._storage.url)
            self._storage.remove(WANTED)
            self._break()

    def _check_empty(self, version: WeightVersion) -> None:
        """Raises ``RunError`` if the storage has weights of another run: versions after the first that this one writes."""
        later = [each.name for each in self._storage.files() if (parsed := parse_name(each.name)) is not None and parsed[0] > version]
        if later:
            raise RunError(
                f"'{self._storage.url}' has the weights of another run ('{later[-1]}' is newer than those {describe(version)}); give each run a folder of its "
                "own (pods.weights_url), or empty this one"
            )

    def _give_up(self, why: str) -> None:
        """Gives up what waits. Called with the lock."""
        logger.warning("weights are not written to the storage: %s. Training goes on; the next version that can be written is whole", why)
        for each in self._waiting:
            each.path.unlink(missing_ok=True)
        self._waiting.clear()
        self._is_broken = True

    def _break(self) -> None:
        with self._changed:
            self._is_broken = True

    def wait(self, seconds: float) -> bool:
        """Waits until everything was sent or given up; returns whether that took no more than ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_sending, seconds)

    def close(self) -> None:
        """Sends what waits, for a minute at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        self._scratch.__exit__(None, None, None)


def _write(file: BinaryIO, content: memoryview) -> None:
    for at in range(0, len(content), _COPY_BYTES):
        file.write(content[at : at + _COPY_BYTES])


