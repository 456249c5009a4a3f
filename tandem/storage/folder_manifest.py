"""The manifest of a folder of files, such as a model's: ``manifest.json`` names the size and the digest of every file beside it.

    {"format": "tandem-folder-1", "digest": D, "files": {"model.safetensors": {"size": N, "xxh3_128": D}, ...}}

``digest`` covers the names, sizes and digests of all files. Files are hashed in parallel; xxh3-128 where its package is installed, else BLAKE2b-128.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tandem.storage.digests import Algorithm, best_algorithm, new_digest
from tandem.types.errors import RunError

MANIFEST = "manifest.json"
FORMAT = "tandem-folder-1"
_ALGORITHMS: tuple[Algorithm, ...] = ("xxh3_128", "blake2b_128")
_BLOCK_BYTES = 1 << 20


class FileDigest(NamedTuple):
    """A file of ``size`` bytes; ``digest`` in hexadecimal."""

    size: int
    algorithm: Algorithm
    digest: str


Files = Mapping[str, FileDigest]
OnBytes = Callable[[int], None]


def file_digest(path: Path, algorithm: Algorithm, on_bytes: OnBytes = lambda count: None) -> FileDigest:
    """Returns the digest of a file. ``on_bytes`` is called with the number of bytes of every block that was read. Raises ``OSError``."""
    digest = new_digest(algorithm)
    size, memory = 0, memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            digest.update(memory[:count])
            size += count
            on_bytes(count)
    return FileDigest(size, algorithm, digest.hexdigest())


def folder_digests(folder: Path, names: Collection[str] | None = None, on_bytes: OnBytes = lambda count: None) -> dict[str, FileDigest]:
    """Returns the digests of the files ``names`` of ``folder``, of all files but the manifest and hidden ones without them. Raises ``OSError``."""
    chosen = sorted(names if names is not None else (path.name for path in folder.iterdir() if path.is_file() and _is_listed(path.name)))
    with ThreadPoolExecutor(max_workers=min(len(chosen), os.cpu_count() or 1) or 1) as pool:
        return dict(zip(chosen, pool.map(lambda name: file_digest(folder / name, best_algorithm(), on_bytes), chosen), strict=True))


def write_manifest(folder: Path) -> str:
    """Flushes the files of ``folder`` to the disk, writes their manifest and returns its digest. Raises ``OSError``."""
    files = folder_digests(folder)
    for name in files:
        sync_path(folder / name)
    digest = digest_of(files)
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "digest": digest, "files": to_json(files)}, indent=1) + "\n", encoding="utf-8")
    sync_path(folder / MANIFEST)
    sync_path(folder)
    return digest


def read_manifest(folder: Path) -> Files | None:
    """Returns the files that the manifest of ``folder`` names, ``None`` if it has no manifest. Raises ``RunError`` where the manifest is damaged."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"'{path}' cannot be read: {error}; restore the folder from a copy") from None
    try:
        content = json.loads(text)
        files = parse_files(content["files"])
        is_whole = content["format"] == FORMAT and content["digest"] == digest_of(files)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise RunError(f"'{path}' is damaged; restore the folder from a copy")
    return files


def parse_files(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, FileDigest]:
    """Returns the files of the field ``files`` of a manifest. Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` if it is not one."""
    files = {}
    for name, entry in entries.items():
        algorithm = next((known for known in _ALGORITHMS if known in entry), None)
        if algorithm is None or len(entry) != 2:
            raise ValueError(f"no digest of '{name}'")
        files[str(name)] = FileDigest(int(entry["size"]), algorithm, str(entry[algorithm]))
    return files


def to_json(files: Files) -> dict[str, dict[str, Any]]:
    """Returns plain data that ``parse_files`` reads."""
    return {name: {"size": file.size, file.algorithm: file.digest} for name, file in files.items()}


def damaged_files(folder: Path, files: Files, on_bytes: OnBytes = lambda count: None) -> list[str]:
    """Returns what is wrong with ``files`` of ``folder``, one line each, and [] if every byte is as it was written. Files of other names are
    ignored. Raises ``RunError`` where a digest's package is not installed."""

    def damage(name: str, wanted: FileDigest) -> str | None:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != wanted.size:
                return f"'{path}' has {size} bytes instead of {wanted.size}"
            if file_digest(path, wanted.algorithm, on_bytes).digest != wanted.digest:
                return f"'{path}' does not have the digest it was written with"
        except FileNotFoundError:
            return f"'{path}' is missing"
        except OSError as error:
            return f"'{path}' cannot be read: {error.strerror or error}"
        return None

    with ThreadPoolExecutor(max_workers=min(len(files), os.cpu_count() or 1) or 1) as pool:
        return [found for found in pool.map(lambda item: damage(*item), sorted(files.items())) if found is not None]


def check_folder(folder: Path, on_bytes: OnBytes = lambda count: None) -> None:
    """Raises ``RunError`` in one line if ``folder`` has no manifest or is not as its manifest says."""
    files = read_manifest(folder)
    if files is None:
        raise RunError(f"'{folder}' has no {MANIFEST} and cannot be verified; leave out --verify, or export the model again")
    if damaged := damaged_files(folder, files, on_bytes):
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        raise RunError(f"{damaged[0]}{more}; restore the folder from a copy, or export the model again")


def digest_of(files: Files) -> str:
    """Returns the BLAKE2b-128 digest over names, sizes and digests, in hexadecimal."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        total.update(json.dumps([name, *files[name]]).encode())
    return total.hexdigest()


def sync_path(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file, whole or not at all: under another name, flushed to the disk, and by one atomic rename."""
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    sync_path(fresh)
    fresh.replace(path)


def _is_listed(name: str) -> bool:
    return name != MANIFEST and not name.startswith(".")
