"""Object storage behind one small interface: a folder, or anything that fsspec knows (``s3://bucket/prefix``).

Names are relative to the storage's root and have forward slashes. A file is there whole or not at all: a folder gets it by
rename, an object store by the end of its upload.
"""

import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from tandem.runtime.process.temporary import temporary_folder
from tandem.storage.backend import connect, is_local, local_path
from tandem.types import RunError, UserError


class StoredFile(NamedTuple):
    """``name`` relative to the root, ``size`` in bytes."""

    name: str
    size: int


class Storage(Protocol):
    """A root with files under it."""

    @property
    def url(self) -> str: ...

    def files(self) -> list[StoredFile]:
        """Every file under the root, in the order of their names; hidden ones (a part that begins with a dot) left out."""
        ...

    def open(self, name: str) -> BinaryIO:
        """A file for reading, seekable. Raises ``FileNotFoundError``."""
        ...

    def put(self, name: str, source: Path) -> None:
        """Move the local file ``source`` to ``name``, which is replaced whole where it is there."""
        ...

    def copy(self, name: str, source: Path) -> None:
        """Copy the local file ``source`` to ``name``, which is replaced whole where it is there."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file; one that is not there is no error."""
        ...

    def local(self, name: str) -> Path | None:
        """Where ``name`` lies on this machine, or ``None`` for a storage that is elsewhere."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """A passing folder on this machine for what will be put here, of one process at a time. One that a killed process left is cleared
        away, where it can be known. Raises ``UserError`` where another process has one now."""
        ...


def open_storage(url: str, *, create: bool = False) -> Storage:
    """Returns the storage at ``url``: a path, ``file://``, or a scheme of fsspec. ``create`` makes a missing folder. Raises
    ``UserError`` if the folder does not exist."""
    if is_local(url):
        return FolderStorage.at(Path(local_path(url)), create)
    backend, root = connect(url, is_cached=False)
    return RemoteStorage(url, backend, root)


def read(storage: Storage, name: str) -> bytes:
    """All of a file."""
    with storage.open(name) as file:
        return file.read()


def read_blocks(storage: Storage, name: str, size: int = 4 << 20) -> Iterator[bytes]:
    """A file in blocks of ``size`` bytes, the last one shorter. Raises ``FileNotFoundError``, and ``RunError`` where the storage fails."""
    with service_errors(storage.url):
        file = storage.open(name)
    with file:
        while True:
            with service_errors(storage.url):
                data = file.read(size)
            if not data:
                return
            yield data


@dataclass(frozen=True, slots=True)
class FolderStorage:
    """Files under ``root``."""

    root: Path

    @classmethod
    def at(cls, root: Path, create: bool) -> "FolderStorage":
        try:
            if create:
                root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder '{root}' cannot be made: {error.strerror}; name another one") from None
        if not root.is_dir():
            raise UserError(f"'{root}' is not a folder; name the folder that holds the data")
        return cls(root)

    @property
    def url(self) -> str:
        return str(self.root)

    def files(self) -> list[StoredFile]:
        files = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if not name.startswith("."):
                    path = Path(folder, name)
                    files.append(StoredFile(path.relative_to(self.root).as_posix(), path.stat().st_size))
        return sorted(files)

    def open(self, name: str) -> BinaryIO:
        return (self.root / name).open("rb")

    def put(self, name: str, source: Path) -> None:
        self._bring(name, source, shutil.move)

    def copy(self, name: str, source: Path) -> None:
        self._bring(name, source, shutil.copyfile)

    def _bring(self, name: str, source: Path, bring: Callable[[Path, Path], object]) -> None:
        target = self.root / name
        # Always the same name: what a killed writer left is written over by the one that repeats its work.
        fresh = target.parent / f".{target.name}.tmp"
        with _disk(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            bring(source, fresh)
            descriptor = os.open(fresh, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            fresh.replace(target)

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def local(self, name: str) -> Path | None:
        return self.root / name

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        # On the same disk, so that putting a file here is a rename.
        folder = self.root / ".scratch"
        with _locked(self.root):
            shutil.rmtree(folder, ignore_errors=True)
            with _disk(folder):
                folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RemoteStorage:
    """Files under ``root`` of the fsspec file system ``backend``."""

    url: str
    backend: Any
    root: str

    def files(self) -> list[StoredFile]:
        with service_errors(self.url):
            entries = self.backend.find(self.root, detail=True)
        start = len(self.root.rstrip("/")) + 1
        named = [StoredFile(path[start:], int(entry["size"])) for path, entry in entries.items()]
        return sorted(file for file in named if not any(part.startswith(".") for part in file.name.split("/")))

    def open(self, name: str) -> BinaryIO:
        with service_errors(self.url):
            file = self.backend.open(f"{self.root}/{name}", "rb")
        # The files of most backends have no bounded ``readline``.
        return cast(BinaryIO, file if isinstance(file, io.BufferedIOBase) else io.BufferedReader(file))

    def put(self, name: str, source: Path) -> None:
        self.copy(name, source)
        source.unlink()

    def copy(self, name: str, source: Path) -> None:
        with service_errors(self.url):
            self.backend.put_file(str(source), f"{self.root}/{name}")

    def remove(self, name: str) -> None:
        with service_errors(self.url):
            try:
                self.backend.rm_file(f"{self.root}/{name}")
            except FileNotFoundError:
                return

    def local(self, name: str) -> Path | None:
        return None

    def scratch(self) -> AbstractContextManager[Path]:
        return temporary_folder()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing to '{folder}'; wait for its end, or name another folder") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"'{path}' cannot be written: {error.strerror or error}; make room or name another folder, then start again") from None


@contextmanager
def service_errors(url: str) -> Iterator[None]:
    """Raises ``RunError`` for any error of the storage at ``url`` but a missing file."""
    with one_line_errors(f"'{url}'", FileNotFoundError):
        yield


@contextmanager
def one_line_errors(service: str, *passed: type[Exception]) -> Iterator[None]:
    """Raises ``RunError`` of one line that names the ``service`` for any error of it and of every library below it, but for those that are ``passed`` on."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (RunError, UserError, *passed)):
            raise
        text = " ".join(str(error).split())
        raise RunError(f"{service} does not answer as it should: {type(error).__name__}: {text[:300]}") from None
