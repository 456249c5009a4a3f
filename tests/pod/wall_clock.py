"""A wall clock that a test sets, for Python processes on this machine."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "clock"
"""Its module ``sitecustomize`` shifts the clock of a process that has the environment."""


class WallClock:
    """The clock of the processes with ``environment``, ``seconds`` ahead of the real one. ``path``: a new file."""

    def __init__(self, path: Path, seconds: float = 0.0) -> None:
        self._path = path
        path.write_bytes(struct.pack("<d", seconds))

    @property
    def environment(self) -> Mapping[str, str]:
        folders = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(folders), "TANDEM_TEST_CLOCK": str(self._path)}

    def set(self, seconds: float) -> None:
        """Sets it, also for processes that run."""
        with self._path.open("r+b") as file:
            file.write(struct.pack("<d", seconds))
