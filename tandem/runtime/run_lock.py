"""One process a run directory. The kernel gives the lock back when its holder ends, however it ends."""

import fcntl
import os
from pathlib import Path

from tandem.types.errors import UserError


class RunLock:
    """The exclusive lock on ``runs/NAME/lock``, held until ``release`` or the end of this process."""

    def __init__(self, directory: Path) -> None:
        """Take it now. Raises ``UserError`` with the holder's process id where another process has it."""
        path = directory / "lock"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"the run directory {directory} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._file, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise UserError(
                f"the run directory {directory} is in use by process {holder}; wait for it, end it, or take another run.name"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
