"""Object storage behind one small interface: a folder, or anything that fsspec knows (``s3://bucket/prefix``).

Names are relative to the storage's root and have forward slashes. A file is there whole or not at all: a folder gets it by
rename, an object store by the end of its upload.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple, Protocol

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

    def local(self, name: str) -> Path | None:
        """Where ``name`` lies on this machine, or ``None`` for a storage that is elsewhere."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """A passing folder on this machine for what will be put here. One that a killed process left is cleared away, where
        it can be known."""
        ...


def open_storage(url: str, *, create: bool = False) -> Storage:
    """The storage at ``url``: a path, ``file://``, or a scheme of fsspec. With ``create`` a folder is made. Raises
    ``UserError`` where there is none."""
    scheme, found, rest = url.partition("://")
    if not found or scheme == "file":
        return FolderStorage.at(Path(rest if found else url), create)
    return _remote(url, scheme)


def read(storage: Storage, name: str) -> bytes:
    """All of a file."""
    with storage.open(name) as file:
        return file.read()


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
            raise UserError(f"'{root}' is no folder; name the folder that holds the data")
        return cls(root)

    @property
    def url(self) -> str:
        return str(self.root)

    def files(self) -> list[StoredFile]:
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if not name.startswith("."):
                    path = Path(folder, name)
                    found.append(StoredFile(path.relative_to(self.root).as_posix(), path.stat().st_size))
        return sorted(found)

    def open(self, name: str) -> BinaryIO:
        return (self.root / name).open("rb")

    def put(self, name: str, source: Path) -> None:
        target = self.root / name
        # Always the same name: what a killed writer left is written over by the one that repeats its work.
        fresh = target.parent / f".{target.name}.tmp"
        with _disk(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, fresh)
            descriptor = os.open(fresh, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            fresh.replace(target)

    def local(self, name: str) -> Path | None:
        return self.root / name

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        # On the same disk, so that putting a file here is a rename.
        folder = self.root / ".scratch"
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
        with _service(self.url):
            found = self.backend.find(self.root, detail=True)
        start = len(self.root.rstrip("/")) + 1
        named = [StoredFile(path[start:], int(entry["size"])) for path, entry in found.items()]
        return sorted(file for file in named if not any(part.startswith(".") for part in file.name.split("/")))

    def open(self, name: str) -> BinaryIO:
        with _service(self.url):
            file: BinaryIO = self.backend.open(f"{self.root}/{name}", "rb")
        return file

    def put(self, name: str, source: Path) -> None:
        with _service(self.url):
            self.backend.put_file(str(source), f"{self.root}/{name}")
        source.unlink()

    def local(self, name: str) -> Path | None:
        return None

    def scratch(self) -> AbstractContextManager[Path]:
        return _passing_folder()


@contextmanager
def _passing_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="tandem-data-") as name:
        yield Path(name)


def _remote(url: str, scheme: str) -> RemoteStorage:
    extra = "tandem-rl[s3]" if scheme in ("s3", "s3a") else "fsspec"
    try:
        import fsspec.core
    except ImportError:
        raise UserError(f"'{url}' needs fsspec, which is not installed; pip install '{extra}'") from None
    try:
        backend, root = fsspec.core.url_to_fs(url)
    except ImportError:
        raise UserError(f"'{url}' needs a package that is not installed; pip install '{extra}'") from None
    except ValueError as error:
        raise UserError(f"'{url}' is no address that can be read: {error}") from None
    return RemoteStorage(url, backend, root.rstrip("/"))


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"'{path}' cannot be written: {error.strerror or error}; make room or name another folder, then start again") from None


@contextmanager
def _service(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # every backend has errors of its own
        text = " ".join(str(error).split())
        raise RunError(f"'{url}' does not answer as it should: {type(error).__name__}: {text[:300]}") from None
