"""Downloads from object storage to the local disk: ranges are fetched in parallel and written in order, so that the next process
resumes an interrupted download."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tandem.model.weight_store.manifest import Manifest, Part, StoredFile
from tandem.model.weight_store.objects import Digest, RemoteFile, RemoteFolder
from tandem.storage.digests import new_digest
from tandem.storage.folder_manifest import file_digest
from tandem.types import RunError, UserError

RANGE_BYTES = 8 << 20
STREAMS = 4
"""Ranges that are read in parallel."""
SAFE_BYTES = 64 << 20
"""Maximum number of bytes that are downloaded again after a crash."""

Progress = Callable[[int, int], None]
"""Called with the bytes downloaded so far and the total."""


def fetch(remote: RemoteFolder, manifest: Manifest, entry: Path, on_progress: Progress | None = None) -> None:
    """Downloads every file of ``manifest`` that is not stored to ``entry/model``, updating the manifest after each step.

    Raises ``RunError`` if a file does not have the digest that its folder publishes, or changes during the download; ``OSError`` if the
    disk fails."""
    (entry / "model").mkdir(parents=True, exist_ok=True)
    try:
        _fetch_files(remote, manifest, entry, on_progress)
    except (RunError, UserError):
        # A folder that is rewritten during the download has short or missing files; the change is the cause to report.
        if not _is_changed(remote, manifest):
            raise
    else:
        if remote.list() == manifest.files:
            return
    manifest.stored.clear()
    manifest.part = None
    manifest.write(entry)
    raise RunError(f"'{remote.url}' changed while it was downloaded; start again")


def _is_changed(remote: RemoteFolder, manifest: Manifest) -> bool:
    try:
        return remote.list() != manifest.files
    except (RunError, UserError):
        return False


def _fetch_files(remote: RemoteFolder, manifest: Manifest, entry: Path, on_progress: Progress | None) -> None:
    digests = remote.published_digests(manifest.files)
    sizes = {file.name: file.size_bytes for file in manifest.files}
    here = sum(sizes[name] for name in manifest.stored)
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="weight-store") as pool:
        for file in manifest.files:
            if file.name in manifest.stored:
                continue
            before = here
            report = None if on_progress is None else lambda size, start=before: on_progress(start + size, manifest.total_bytes)
            _fetch_file(remote, file, digests.get(file.name), manifest, entry, pool, report)
            here += file.size_bytes


def file_xxh3(path: Path) -> str:
    """Returns the xxh3-128 of a file, in hexadecimal."""
    return file_digest(path, "xxh3_128").digest


def _fetch_file(
    remote: RemoteFolder, file: RemoteFile, published: Digest | None, manifest: Manifest, entry: Path,
    pool: ThreadPoolExecutor, report: Callable[[int], None] | None,
) -> None:
    part = entry / "part"
    hashers = _hashers(published)
    own, last = hashers[0], hashers[-1]
    size = _resumed(part, manifest.part, file, hashers)
    safe = size
    with part.open("r+b" if size else "wb") as out:
        out.truncate(size)
        out.seek(size)
        for data in _in_order(remote, file, size, pool):
            out.write(data)
            for hasher in hashers:
                hasher.update(data)
            size += len(data)
            if size - safe >= SAFE_BYTES:
                out.flush()
                os.fsync(out.fileno())
                manifest.part, safe = Part(file.name, size, own.hexdigest()), size
                manifest.write(entry)
            if report is not None:
                report(size)
        out.flush()
        os.fsync(out.fileno())
    manifest.part = None
    if published is not None and last.hexdigest() != published.value:
        part.unlink()
        manifest.write(entry)
        raise RunError(f"'{remote.url}/{file.name}' does not have the {published.algorithm} digest that its folder publishes; upload it again")
    final = entry / "model" / file.name
    part.replace(final)
    manifest.stored[file.name] = StoredFile(own.hexdigest(), final.stat().st_mtime_ns)
    manifest.write(entry)


def _hashers(published: Digest | None) -> list[Any]:
    """Returns hashers for our own digest and for the one that the folder publishes, if any."""
    own = [new_digest("xxh3_128")]
    if published is None:
        return own
    return [*own, hashlib.sha256() if published.algorithm == "sha256" else new_digest(published.algorithm)]


def _resumed(part: Path, known: Part | None, file: RemoteFile, hashers: list[Any]) -> int:
    """Returns how many verified bytes of ``file`` are in ``part``; ``hashers`` have consumed them."""
    if known is None or known.name != file.name or not part.is_file():
        return 0
    fresh = hashers[0].copy()
    for data in _beginning(part, known.size_bytes):
        fresh.update(data)
    if fresh.hexdigest() != known.xxh3:
        return 0
    for data in _beginning(part, known.size_bytes):
        for hasher in hashers:
            hasher.update(data)
    return known.size_bytes


def _beginning(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while size and (data := file.read(min(size, RANGE_BYTES))):
            size -= len(data)
            yield data


def _in_order(remote: RemoteFolder, file: RemoteFile, start: int, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """Yields the bytes of ``file`` from ``start`` on, with a few ranges fetched ahead."""
    starts = iter(range(start, file.size_bytes, RANGE_BYTES))
    under_way: deque[Future[bytes]] = deque()

    def add() -> None:
        begin = next(starts, None)
        if begin is not None:
            under_way.append(pool.submit(remote.read, file.name, begin, min(begin + RANGE_BYTES, file.size_bytes)))

    try:
        for _ in range(2 * STREAMS):
            add()
        while under_way:
            data = under_way.popleft().result()
            add()
            yield data
    finally:
        for future in under_way:
            future.cancel()
