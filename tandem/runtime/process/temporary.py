"""Temporary files and folders of which nothing stays behind, however their owner ends."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "tandem"


SYSTEM_FOLDERS = ("/tmp", "/var/tmp", "/usr/tmp")


def choose_temporary_folder() -> None:
    """Sets the folder for temporary files of this process, as Python would choose it: Python's own search writes a file to it, which a kill at that
    moment leaves behind. Without a folder that can be written nothing is set."""
    if tempfile.tempdir is not None:
        return
    for folder in (*(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), *SYSTEM_FOLDERS):
        if folder and Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = str(Path(folder).absolute())
            return


class UnnamedFile:
    """An empty file in memory without a name, which the kernel frees with the last process that has it open. ``path``: by which processes of this
    user open it while this process lives and the file is not closed."""

    def __init__(self, label: str) -> None:
        # Outside of Linux there is no path to an unnamed file.
        self._named = ""
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create(label)
        else:
            self._file, self._named = tempfile.mkstemp(prefix=f"{PREFIX}-")
        self.path = Path(self._named or f"/proc/{os.getpid()}/fd/{self._file}")

    def read_text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if self._named:
                self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that afterwards becomes ``folder``, which must not exist, unless an exception was raised: it is there whole or not at all. What a
    killed process left of the same name is removed first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent, f".{folder.name}") as scratch:
        written = scratch / folder.name
        written.mkdir()
        yield written
        written.rename(folder)


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None, prefix: str = PREFIX) -> Iterator[Path]:
    """Yields a new folder in ``parent`` (``None``: the system's folder for temporary files) and removes it afterwards. Removes those of owners
    that were killed first."""
    parent = parent or Path(tempfile.gettempdir())
    sweep_temporary(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))
    try:
        with _lock(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_temporary(parent: Path | None = None, prefix: str = PREFIX) -> list[Path]:
    """Removes the folders that ``temporary_folder`` made for processes of this user that were killed; returns them."""
    removed = []
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}-*-*"):
        match = re.fullmatch(rf"{re.escape(prefix)}-(\d+)-\w+", folder.name)
        if not match or _alive(int(match[1])):
            continue
        # The owner may live in another PID namespace, or the number may be another process's now: the lock decides.
        with contextlib.suppress(OSError), _lock(folder):
            if folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds the lock of ``folder``, which ends with this process. Raises ``OSError`` where another process has it."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
