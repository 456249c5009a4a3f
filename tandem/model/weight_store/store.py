"""The weight cache: one folder per model and version, shared by all processes of the machine.

A process that reads a model holds a shared lock on it, one that downloads it an exclusive one, and eviction takes an exclusive lock first.
The locks are the kernel's, so a killed process releases them. A process holds ``cache.lock`` briefly while it frees space or downgrades its
exclusive lock to a shared one.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import IO, Any

from tandem.model.weight_store.download import Progress, fetch, file_xxh3
from tandem.model.weight_store.manifest import NAME, Manifest, read_manifest
from tandem.model.weight_store.objects import RemoteFile, RemoteFolder
from tandem.storage.disk_space import free_bytes
from tandem.types import RunError, UserError

WAIT_S = 0.1
_FULL = {errno.ENOSPC, errno.EDQUOT}


def is_remote(model: str | Path) -> bool:
    """Returns whether ``model`` is a URL of object storage (``s3://bucket/folder``), not a path or a name of the Hub."""
    return isinstance(model, str) and re.match(r"(?!hf://)[a-z][a-z0-9+.-]*://", model) is not None


class HeldModel:
    """A model folder that is not evicted until ``release`` or the end of this process. ``lock``: ``None`` outside the cache."""

    def __init__(self, path: Path, lock: IO[bytes] | None = None) -> None:
        self.path = path
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "HeldModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WeightStore:
    """The cache in ``directory`` (``None``: ``~/.cache/tandem/weights``), of at most ``max_bytes`` (0: limited by the disk). ``options``
    are passed to the storage's library. ``on_progress`` reports downloads, including those of other processes that this one waits for."""

    def __init__(
        self, directory: str | Path | None = None, max_bytes: int = 0, on_progress: Progress | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_bytes < 0:
            raise UserError(f"the weight cache's size is {max_bytes} bytes; it must be 0 (no limit) or more")
        self.directory = Path("~/.cache/tandem/weights" if directory is None else directory).expanduser()
        self._max_bytes = max_bytes
        self._on_progress = on_progress
        self._options = options

    def hold(self, url: str, verify: bool = False) -> HeldModel:
        """Returns the folder at ``url`` on the local disk, downloaded if it is not cached or has changed.

        Files whose size or modification time differ from the download's are compared by digest, with ``verify`` all files, and damaged ones
        are downloaded again. If the storage cannot be reached, the most recently used copy is returned with a warning. Raises ``UserError``
        in one line for a missing model, a model larger than the cache or a full disk; ``RunError`` if the storage cannot be reached and
        there is no copy."""
        remote = RemoteFolder(url, self._options)
        try:
            files = remote.list()
        except RunError as error:
            last = self._last_copy(remote.url, verify)
            if last is None:
                raise
            warnings.warn(f"{error}; using the copy in '{last.path}', which may be outdated", stacklevel=2)
            return last
        key = _key(remote.url, files)
        entry = self.directory / key
        try:
            (self.directory / "locks").mkdir(parents=True, exist_ok=True)
            lock = (self.directory / "locks" / key).open("ab")
        except OSError as error:
            raise UserError(f"the weight cache '{self.directory}' cannot be written: {error.strerror}; name another folder") from None
        try:
            while not (self._take_shared(lock, entry, verify) or self._bring(lock, entry, remote, files, verify)):
                self._watch(entry)
                time.sleep(WAIT_S)
        except BaseException:
            lock.close()
            raise
        return HeldModel(entry / "model", lock)

    def _last_copy(self, url: str, verify: bool) -> HeldModel | None:
        """Returns the most recently used copy of ``url``, of any version; ``None`` if none is complete."""
        entries = [path.parent for path in self.directory.glob(f"*/{NAME}")]
        for entry in sorted(entries, key=_last_used, reverse=True):
            manifest = read_manifest(entry)
            if manifest is not None and manifest.url == url and manifest.is_complete:
                lock = (self.directory / "locks" / entry.name).open("ab")
                if self._take_shared(lock, entry, verify):
                    return HeldModel(entry / "model", lock)
                lock.close()
        return None

    def _take_shared(self, lock: IO[bytes], entry: Path, verify: bool) -> bool:
        """Returns whether the model is cached completely; it is locked then."""
        with self._whole_cache():
            if not _try_lock(lock, fcntl.LOCK_SH):
                return False
        manifest = read_manifest(entry)
        if manifest is not None and manifest.is_complete and not _damaged(manifest, entry, verify):
            os.utime(entry / NAME)
            return True
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False

    def _bring(self, lock: IO[bytes], entry: Path, remote: RemoteFolder, files: tuple[RemoteFile, ...], verify: bool) -> bool:
        """Downloads what is missing. Returns ``False`` if another process has the model locked; otherwise it is complete and locked."""
        if not _try_lock(lock, fcntl.LOCK_EX):
            return False
        manifest = read_manifest(entry) or Manifest(remote.url, files)
        for name in _damaged(manifest, entry, verify):
            del manifest.stored[name]
        try:
            with self._whole_cache():
                self._make_room(entry, manifest)
                entry.mkdir(exist_ok=True)
                manifest.write(entry)
            fetch(remote, manifest, entry, self._on_progress)
        except OSError as error:
            if error.errno not in _FULL:
                raise RunError(f"the weight cache '{self.directory}' cannot be written: {error.strerror or error}") from None
            shutil.rmtree(entry, ignore_errors=True)
            raise _no_room(remote.url, manifest.total_bytes, self.directory) from None
        with self._whole_cache():
            fcntl.flock(lock, fcntl.LOCK_SH)
        return True

    def _make_room(self, entry: Path, manifest: Manifest) -> None:
        """Evicts models until ``manifest`` fits, the least recently used first, and never models in use."""
        need = manifest.total_bytes
        if 0 < self._max_bytes < need:
            raise UserError(
                f"'{manifest.url}' has {need} bytes and the weight cache may hold {self._max_bytes}; raise its size"
            )
        missing = need - _bytes_in(entry)
        others = sorted(
            (path for path in self.directory.iterdir() if path.is_dir() and path.name != "locks" and path != entry), key=_last_used
        )
        sizes = {path: _reserved(path) for path in others}
        for path in others:
            within = not self._max_bytes or sum(sizes.values()) + need <= self._max_bytes
            if within and free_bytes(self.directory) >= missing:
                return
            if self._evict(path):
                del sizes[path]
        if self._max_bytes and sum(sizes.values()) + need > self._max_bytes:
            raise UserError(
                f"the weight cache may hold {self._max_bytes} bytes; '{manifest.url}' needs {need} and models in use "
                f"have {sum(sizes.values())}: raise its size"
            )
        if free_bytes(self.directory) < missing:
            raise _no_room(manifest.url, need, self.directory)

    def _evict(self, entry: Path) -> bool:
        """Removes a model. Returns ``False`` if it is in use."""
        with (self.directory / "locks" / entry.name).open("ab") as lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return False
            # Without its manifest the entry no longer counts as a model, even if this process is killed here.
            (entry / NAME).unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)
            return True

    def _watch(self, entry: Path) -> None:
        """Reports the progress of another process's download."""
        manifest = read_manifest(entry)
        if self._on_progress is not None and manifest is not None:
            self._on_progress(min(_bytes_in(entry), manifest.total_bytes), manifest.total_bytes)

    @contextmanager
    def _whole_cache(self) -> Iterator[None]:
        with (self.directory / "locks" / "cache.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _key(url: str, files: tuple[RemoteFile, ...]) -> str:
    """Returns a readable folder name for the current content of ``url``; it changes with any file there."""
    content = json.dumps([url, [astuple(file) for file in files]])
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", url.rpartition("/")[2])[:40]
    return f"{name}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"


def _damaged(manifest: Manifest, entry: Path, verify: bool) -> list[str]:
    """Returns the stored files that differ from what was downloaded."""
    sizes = {file.name: file.size_bytes for file in manifest.files}
    damaged = []
    for name, stored in manifest.stored.items():
        path = entry / "model" / name
        try:
            status = path.stat()
            same = status.st_size == sizes[name]
            if same and (verify or status.st_mtime_ns != stored.mtime_ns):
                same = file_xxh3(path) == stored.xxh3
        except OSError:
            same = False
        if not same:
            damaged.append(name)
    return damaged


def _try_lock(lock: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _reserved(entry: Path) -> int:
    """Returns the bytes that a model occupies or will occupy."""
    manifest = read_manifest(entry)
    return _bytes_in(entry) if manifest is None else manifest.total_bytes


def _bytes_in(entry: Path) -> int:
    return sum(map(_size, [entry / "part", *(entry / "model").glob("*")]))


def _size(path: Path) -> int:
    """Returns the file's size; 0 if another process has moved or removed it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_used(entry: Path) -> int:
    try:
        return (entry / NAME).stat().st_mtime_ns
    except OSError:
        return 0


def _no_room(url: str, need: int, directory: Path) -> UserError:
    free = free_bytes(directory)
    return UserError(
        f"no space left for '{url}' ({need / 2**20:.0f} MiB) in the weight cache '{directory}' ({free / 2**20:.0f} MiB free); "
        "free some space or name another folder"
    )
