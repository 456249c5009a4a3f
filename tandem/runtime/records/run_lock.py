"""Allows one process for each run directory. The kernel releases the lock when its holder ends, also by ``kill -9``."""

import os
from pathlib import Path

from tandem.types.errors import UserError

_LOCKS = Path("/proc/locks")


class RunLock:
    """The exclusive lock on ``runs/NAME/lock``, held until ``release`` or the end of this process. The file holds the holder's process id."""

    def __init__(self, directory: Path) -> None:
        """Takes the lock. Raises ``UserError`` with the holder's process id where another process has it."""
        # Imported here: it takes as long as all of ``tandem --help``.
        from filelock import FileLock, Timeout

        path = directory / "lock"
        # No soft lock: a lock that is the existence of a file would outlive a holder that was killed.
        self._lock = FileLock(path, mode=0o644, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(blocking=False)
            path.write_text(f"{os.getpid()}\n", encoding="ascii")
        except Timeout:
            holder = path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
            raise UserError(
                f"the run directory {directory} is in use by process {holder}; wait for it, stop it, or choose another run.name"
            ) from None
        except OSError as error:
            raise UserError(f"the run directory {directory} cannot be written: {error.strerror}") from None

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_holder(directory: Path) -> int | None:
    """Returns the id of the process that has the lock of the run in ``directory``, ``None`` where none has. It takes no lock, so that it stops no run from
    starting, and finds holders on this machine alone."""
    try:
        found = (directory / "lock").stat()
        text = (directory / "lock").read_text(encoding="ascii", errors="replace").strip()[:20]
        locks = _LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in locks:
        # 1: FLOCK  ADVISORY  WRITE 25411 fe:00:2147820 0 EOF
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK" or words[3] != "WRITE":
            continue
        major, minor, inode = words[5].split(":")
        # Some file systems have another device there than here.
        if int(inode) == found.st_ino and (words[4] == text or (int(major, 16), int(minor, 16)) == (os.major(found.st_dev), os.minor(found.st_dev))):
            return int(text) if text.isdigit() else int(words[4])
    return None
