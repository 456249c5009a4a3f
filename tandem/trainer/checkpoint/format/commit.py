"""Two-phase writes of a folder: a fresh name, a digest of every file, fsync, then one atomic rename.

A folder is committed if it contains its marker ``COMMIT`` and every file has the size and digest that the marker names. A process that dies
at any moment leaves at most a folder that readers ignore.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from tandem.types import RunError

MARKER = "COMMIT"
DIGEST_BYTES = 16
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def commit_folder(final: Path, write: Callable[[Path], None]) -> str:
    """Calls ``write(folder)`` on a fresh folder and renames it to ``final``; returns the digest of its content.

    An existing folder is replaced, or kept if it has the same bytes. Raises ``RunError`` if the disk is full or the folder cannot be
    written; ``final`` is then unchanged."""
    fresh = _beside(final)
    try:
        fresh.mkdir(parents=True)
        write(fresh)
        digest = _seal(fresh)
        if final.exists() and damage(final) is None and read_digest(final) == digest:
            shutil.rmtree(fresh)
            return digest
        replaced = final.rename(_beside(final)) if final.exists() else None
        fresh.rename(final)
        sync_directory(final.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return digest
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if error.errno in FULL:
            raise RunError(
                f"'{final}' cannot be written: no space left ({_free(final.parent)}); free some space and resume, "
                "what was committed before is untouched"
            ) from None
        raise RunError(
            f"'{final}' cannot be written: {error.strerror or error}; what was committed before is untouched"
        ) from None
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def damage(folder: Path, digests: bool = True) -> str | None:
    """Returns what is wrong with ``folder`` in one line, or ``None`` if it is committed and every file is as written. Without ``digests``
    only sizes are compared."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = {str(name): (int(entry["size"]), str(entry["blake2b"])) for name, entry in marker["files"].items()}
        named = str(marker["digest"])
    except FileNotFoundError:
        return f"it has no {MARKER} marker: it was never completed" if folder.is_dir() else "it does not exist"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MARKER} marker cannot be read"
    if _digest_of(files) != named:
        return f"its {MARKER} marker is damaged"
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"'{name}' has {path.stat().st_size} bytes instead of {size}"
            if digests and file_digest(path) != digest:
                return f"'{name}' does not have the digest it was written with"
        except OSError as error:
            return f"'{name}' cannot be read: {error.strerror or error}"
    return None


def read_digest(folder: Path) -> str:
    """Returns the digest in the marker of a committed folder."""
    return str(json.loads((folder / MARKER).read_text(encoding="utf-8"))["digest"])


def discard(folder: Path) -> None:
    """Removes ``folder`` so that readers see all of it or nothing."""
    shutil.rmtree(folder.rename(_beside(folder)), ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes what dead writers left under ``parent``."""
    for left in sorted(parent.glob(".*.tmp")):
        shutil.rmtree(left, ignore_errors=True)


def file_digest(path: Path) -> str:
    """Returns the BLAKE2b-128 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def sync_file(path: Path) -> None:
    """Flushes a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file


def _beside(final: Path) -> Path:
    return final.parent / f".{final.name}.{secrets.token_hex(4)}.tmp"


def _seal(folder: Path) -> str:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync_file(path)
        files[str(path.relative_to(folder))] = (path.stat().st_size, file_digest(path))
    digest = _digest_of(files)
    entries = {name: {"size": size, "blake2b": value} for name, (size, value) in files.items()}
    (folder / MARKER).write_text(json.dumps({"digest": digest, "files": entries}, indent=1) + "\n", encoding="utf-8")
    sync_file(folder / MARKER)
    for directory in (p for p in folder.rglob("*") if p.is_dir()):
        sync_directory(directory)
    sync_directory(folder)
    return digest


def _digest_of(files: dict[str, tuple[int, str]]) -> str:
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(files):
        total.update(json.dumps([name, *files[name]]).encode())
    return total.hexdigest()


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free there"
