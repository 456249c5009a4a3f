"""The targets folder: every process of Tandem that has ``/metrics`` writes itself there, and Prometheus reads it (``file_sd_configs``).

A target is one file of its own, a JSON list with ``targets`` and ``labels``. Its process holds a lock on it, which the kernel releases when the process
ends, also by ``kill -9``, so any process can tell that a target has ended. ``sweep`` renames the file of one (``NAME.dead.json``, which Prometheus still
reads, so that the alert on a target that is down can fire) and removes it ``KEPT_S`` later.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from tandem.types.errors import UserError

DEFAULT_FOLDER = "~/.cache/tandem/targets"
KEPT_S = 180.0
"""How long a target stays in the folder after its process has died without removing it."""
DEAD = ".dead.json"
_UNFINISHED_S = 60.0


def check_folder(folder: str | Path) -> Path:
    """Returns the targets folder, made if it does not exist. Raises ``UserError`` where no file can be written in it."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise UserError(f"targets folder '{path}' cannot be written ({why}); name another one")
    return path


@contextlib.contextmanager
def announced(
    folder: str | Path, identity: str, address: tuple[object, ...], labels: Mapping[str, str], *, tls: bool = False, path: str = ""
) -> Iterator[Path]:
    """Yields the file that names this process in the targets folder, and removes it afterwards.

    Args:
        identity: what this process is, on this machine: a target of the same identity whose process is dead is removed.
        address: of its listener, as ``getsockname`` gives it.
        labels: those of all its series: ``job`` and others.
        tls: it speaks HTTPS.
        path: the prefix of ``/metrics``.
    """
    where = check_folder(folder)
    digest = blake2b(f"{socket.gethostname()} {identity}".encode(), digest_size=4).hexdigest()
    prefix = f"{re.sub(r'[^a-zA-Z0-9_.-]+', '-', identity)[-60:].strip('-.')}-{digest}"
    host, port = str(address[0]), address[1]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    extra = ({"__scheme__": "https"} if tls else {}) | ({"__metrics_path__": f"{path}/metrics"} if path else {})
    target = [{"targets": [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"], "labels": {**labels, **extra}}]
    file = where / f"{prefix}-{secrets.token_hex(4)}.json"
    fresh = where / f".{file.name}.tmp"
    try:
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"targets folder '{where}' cannot be written ({error.strerror}); name another one") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(target, indent=1).encode() + b"\n")
        fresh.replace(file)
        for before in where.glob(f"{prefix}-*.json"):
            if before != file and is_dead(before):
                before.unlink(missing_ok=True)
        yield file
    finally:
        fresh.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        # A sweep that saw the file between the end of the lock and now has renamed it.
        file.with_name(file.name.removesuffix(".json") + DEAD).unlink(missing_ok=True)
        os.close(descriptor)


def is_dead(file: Path) -> bool:
    """Returns whether the process that wrote ``file`` has ended without removing it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def sweep(folder: Path, kept_s: float = KEPT_S) -> None:
    """Marks the targets of dead processes, and removes those that were marked ``kept_s`` ago or before."""
    now = time.time()
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            if file.name.endswith(DEAD):
                if now - file.stat().st_mtime >= kept_s:
                    file.unlink()
            elif is_dead(file):
                marked = file.with_name(file.name.removesuffix(".json") + DEAD)
                file.replace(marked)
                os.utime(marked)
                if kept_s <= 0:
                    marked.unlink()
    for file in folder.glob(".*.json.tmp"):
        with contextlib.suppress(OSError):
            if now - file.stat().st_mtime > _UNFINISHED_S and is_dead(file):
                file.unlink()
