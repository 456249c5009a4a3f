"""The weights that are not trained, beside an adapter that is: their files go once to each pod of another machine, which keeps them for its next life.

The controller sends a file in parts, from where an earlier transfer ended, and the pod compares the digest of the whole. Imports no torch.
"""

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.storage.digests import CHUNK_BYTES, best_algorithm, new_digest
from tandem.storage.disk_space import free_bytes
from tandem.types import RunError
from tandem.types.wire import Buffer, Frame

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 2**20
"""Sent in one call: within the seconds that a server waits for a call, also over 4 Mbit/s."""
_ATTEMPTS = 2


class Asks(Protocol):
    def ask(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None) -> Frame: ...


def weight_files(folder: Path) -> dict[str, str]:
    """Returns the names of the files with weights in ``folder``, with their digests."""
    return {path.name: digest_of(path, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))}


@functools.lru_cache(64)
def digest_of(path: Path, size_bytes: int, changed_ns: int) -> str:
    """Returns ``ALGORITHM:DIGEST`` of a file, read once for all pods."""
    return _digest(path, best_algorithm())


def _digest(path: Path, algorithm: str) -> str:
    digest = new_digest(algorithm)
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            digest.update(part)
    return f"{algorithm}:{digest.hexdigest()}"


def send_weights(pod: Asks, folder: Path, files: Mapping[str, str]) -> None:
    """Sends ``pod`` what it does not have of ``files`` in ``folder``. Raises ``RunError`` if a file arrives twice with another digest, and what ``ask``
    raises."""
    for name, digest in files.items():
        size_bytes = (folder / name).stat().st_size
        meta = {"name": name, "digest": digest, "size_bytes": size_bytes}
        with (folder / name).open("rb") as file:
            held, attempts = int(pod.ask("receive_file", {**meta, "offset": 0}, {"part": b""}).meta["held_bytes"]), 1
            while held < size_bytes:
                file.seek(held)
                now = int(pod.ask("receive_file", {**meta, "offset": held}, {"part": file.read(PART_BYTES)}).meta["held_bytes"])
                if now <= held:
                    attempts += 1
                    if attempts > _ATTEMPTS:
                        raise RunError(f"the weights '{name}' arrived {_ATTEMPTS} times without their digest")
                held = now


class KeptWeights:
    """The files of earlier lives and of this one, in ``folder``, by their digests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def expect(self, digests: Mapping[str, str]) -> None:
        """Forgets the files but those with ``digests``."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        wanted = {_file_name(digest) for digest in digests.values()}
        for path in self._folder.iterdir():
            if path.name.removesuffix(".part") not in wanted:
                path.unlink()

    def receive(self, meta: Meta, part: Buffer, model: Path) -> int:
        """Adds ``part`` to the file with the ``digest`` of ``meta``, at its ``offset``. Returns how many of its bytes are here. When all are, and they have the
        digest, the file is in the folder ``model`` under its ``name``; with another digest none are left. Raises ``RunError`` where nothing can be written."""
        name, digest, size_bytes, offset = str(meta["name"]), str(meta["digest"]), int(meta["size_bytes"]), int(meta["offset"])
        if Path(name).name != name:
            raise RunError(f"'{name}' is not the name of a file of a model")
        whole = self._folder / _file_name(digest)
        begun = whole.with_name(f"{whole.name}.part")
        with _named(begun):
            if whole.exists():
                whole.replace(begun)
            if not begun.exists():
                begun.touch()
            held = begun.stat().st_size
            if not len(part) and held < size_bytes:
                _check_free(begun, size_bytes - held)
                return held
            if len(part):
                if offset != held:
                    return held
                with begun.open("ab") as file:
                    file.write(part)
                held += len(part)
            if held < size_bytes:
                return held
            if held != size_bytes or _digest(begun, digest.partition(":")[0]) != digest:
                logger.warning("the file '%s' does not have its digest and is received again", name)
                begun.unlink()
                return 0
            begun.replace(whole)
            link = model / name
            link.unlink(missing_ok=True)
            os.link(whole, link)
        return held


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"the weights that are not trained cannot be kept at '{path}': {error.strerror or error}") from None


def _check_free(path: Path, needed_bytes: int) -> None:
    if (free := free_bytes(path.parent)) < needed_bytes:
        raise RunError(
            f"the weights that are not trained need {needed_bytes:,} bytes more and the disk of '{path.parent}' has {free:,} free; choose another --folder"
        )


def _file_name(digest: str) -> str:
    """Returns the name of the file with ``digest``. Raises ``RunError`` for what is not one."""
    algorithm, _, digits = digest.partition(":")
    if not (digits.isalnum() and algorithm.replace("_", "").isalnum()):
        raise RunError(f"'{digest}' is not a digest of a file")
    return f"{algorithm}-{digits}"
