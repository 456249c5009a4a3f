"""Where the data of a run's own etcd is: on a disk with room, and on another one when that is full. What it has is not kept for a resume."""

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder
from tandem.storage.disk_space import free_bytes

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
_SHARED = "etcd-"
"""Beginning of the name of the folder in the shared place, which is the run's own."""
_ROOM_BYTES = 192 * 2**20
"""Two segments of etcd's log, each of which it reserves as a whole, and its database."""
_FULL_BYTES = 96 * 2**20
"""A disk with less is full: the next segment has no room."""
_OF_MEMORY = 4
"""Shared memory is the run's too, whose weights go through it: it has so many times the room, or is left alone."""


class EtcdPlaces:
    """``data``: its folder now. The places are this machine's folder for temporary files, its memory, and ``shared`` (``None``: there is none)."""

    def __init__(self, shared: Path | None) -> None:
        choose_temporary_folder()
        self._shared, self.data = shared, Path()
        self._stack = contextlib.ExitStack()

    def begin(self) -> Path:
        """Returns a new folder in the first place with room. Removes what an earlier job of the run, which was killed, has left in the shared one. Raises
        ``OSError`` if none can be made."""
        for left in self._shared.glob(f"{_SHARED}*") if self._shared is not None else ():
            shutil.rmtree(left, ignore_errors=True)
        self.data = self._made(next(iter(self._with_room()), Path(tempfile.gettempdir()))) / "etcd"
        return self.data

    def move(self) -> str:
        """Copies the data to the next place with room where the disk that it is on is full. Returns what was done, in words; empty where nothing was."""
        if not self.trouble():
            return ""
        before = self.data.parent.parent
        for place in self._with_room():
            if place == before:
                continue
            try:
                made = self._made(place) / "etcd"
                shutil.copytree(self.data, made)
            except OSError as error:
                logger.warning("the data of etcd cannot be copied to %s: %s", place, error)
                continue
            self.data = made
            return f"the disk of {before} is full: the etcd of the run goes on in {place}"
        return ""

    def trouble(self) -> str:
        """Returns that the disk is full, in words; empty where it is not."""
        try:
            # A folder that is not there any more is named, and does not have the room of the one above.
            self.data.parent.stat()
            free = free_bytes(self.data.parent)
        except OSError as error:
            return f"{self.data.parent.parent}: {error.strerror or error}"
        if free >= _FULL_BYTES:
            return ""
        return f"the disk of {self.data.parent.parent} is full, and no other place here has room"

    def close(self) -> None:
        self._stack.close()

    def _with_room(self) -> list[Path]:
        needed = [(Path(tempfile.gettempdir()), _ROOM_BYTES), (MEMORY, _OF_MEMORY * _ROOM_BYTES), *([(self._shared, _ROOM_BYTES)] if self._shared else [])]
        with_room = []
        for place, least in needed:
            with contextlib.suppress(OSError):
                if os.access(place, os.W_OK) and free_bytes(place) >= least:
                    with_room.append(place)
        return with_room

    def _made(self, place: Path) -> Path:
        if place != self._shared:
            # Swept by the next one there if this process is killed.
            return self._stack.enter_context(temporary_folder(place))
        made = place / f"{_SHARED}{secrets.token_hex(4)}"
        made.mkdir(mode=0o700)
        self._stack.callback(shutil.rmtree, made, ignore_errors=True)
        return made
