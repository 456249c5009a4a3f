"""Allows one process for each run directory. The kernel releases the lock when its holder ends, also by ``kill -9``."""

import contextlib
import os
from pathlib import Path

from tandem.types.errors import UserError


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
    """Returns the process of this machine and user that runs the run in ``directory``. The lock itself is left alone: a run that starts now needs it."""
    path = directory / "lock"
    with contextlib.suppress(OSError, ValueError):
        holder = int(path.read_text(encoding="ascii"))
        # Its number may be another process's by now.
        if any(_is_same(file, path) for file in Path(f"/proc/{holder}/fd").iterdir()):
            return holder
    return None


def _is_same(file: Path, path: Path) -> bool:
    try:
        return file.samefile(path)
    except OSError:
        return False
