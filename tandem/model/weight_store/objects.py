"""Reads a model folder in object storage, through fsspec."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tandem.storage.backend import connect
from tandem.storage.folder_manifest import MANIFEST, parse_files
from tandem.types import RunError, UserError

WANTED = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Suffixes of the files that a model is read from; pickled weights are not included."""

PAUSES_S = (0.2, 1.0, 4.0)
"""Seconds between the attempts to read a range."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """``version`` changes whenever the content does: the storage's entity tag, or the time of the last change."""

    name: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest that the folder publishes; ``algorithm`` is ``sha256``, ``xxh3_128`` or ``blake2b_128``."""

    algorithm: str
    value: str


class RemoteFolder:
    """The folder at ``url``. Credentials and endpoints are those found by the storage's own library (for S3 the usual AWS settings), or
    ``options`` for it. Raises ``UserError`` if that library is missing."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        self._files, self._path = connect(self.url, options, is_cached=False)

    def list(self) -> tuple[RemoteFile, ...]:
        """Returns the files that a model is read from, sorted by name, without subfolders. Raises ``UserError`` if the folder does not
        exist or contains no model."""
        with _one_line(self.url):
            entries = self._files.ls(self._path, detail=True)
        files = []
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry["type"] == "file" and _is_wanted(name):
                files.append(RemoteFile(name, int(entry["size"]), _version(entry)))
        if all(file.name != "config.json" for file in files):
            raise UserError(f"'{self.url}' has no config.json; give the folder of a model")
        return tuple(sorted(files, key=lambda file: file.name))

    def read(self, name: str, start: int, end: int) -> bytes:
        """Returns bytes ``start .. end - 1`` of a file. Retries after transient errors."""
        for pause in (*PAUSES_S, None):
            try:
                with _one_line(f"{self.url}/{name}"):
                    data: bytes = self._files.cat_file(f"{self._path}/{name}", start=start, end=end)
                    if len(data) != end - start:
                        raise OSError(f"{len(data)} bytes received instead of {end - start}")
                    return data
            except RunError:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def published_digests(self, files: tuple[RemoteFile, ...]) -> dict[str, Digest]:
        """Returns digests by file name, from ``SHA256SUMS`` (as written by sha256sum) or ``manifest.json`` (as written by an export), if one of them
        is among ``files``."""
        sizes = {file.name: file.size_bytes for file in files}
        digests: dict[str, Digest] = {}
        for name, parse in _PUBLISHED.items():
            if name in sizes:
                try:
                    digests |= parse(self.read(name, 0, sizes[name]).decode())
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise UserError(f"'{self.url}/{name}' cannot be read; write it again or remove it") from None
        return digests


def _sha256sums(text: str) -> dict[str, Digest]:
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return {name.lstrip("*").removeprefix("./"): Digest("sha256", value.lower()) for value, name in pairs}


def _manifest(text: str) -> dict[str, Digest]:
    return {name: Digest(file.algorithm, file.digest) for name, file in parse_files(json.loads(text)["files"]).items()}


_PUBLISHED = {MANIFEST: _manifest, "SHA256SUMS": _sha256sums}


def _is_wanted(name: str) -> bool:
    # Mistral's own format contains the same weights again.
    return name in _PUBLISHED or (name.endswith(WANTED) and not name.startswith("consolidated"))


def _version(entry: Mapping[str, Any]) -> str:
    known = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created")
    return str(next((entry[key] for key in known if entry.get(key) is not None), ""))


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Converts the errors of storage libraries, which have no common type, to ``UserError`` and ``RunError``."""
    try:
        yield
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"'{name}' does not exist; check the address") from None
    except PermissionError as error:
        raise UserError(f"'{name}' cannot be read (permission denied): {_line(error)}") from None
    except Exception as error:
        raise RunError(f"'{name}' cannot be read: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
