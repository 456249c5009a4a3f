"""The files of a keeper: in its process, or in a folder of its node, tmpfs or NVMe, where they outlive it: a scheduler may end every process of a job when
it loses one node, and begin the job again on the others. Imports no torch.
"""

import fcntl
import json
import mmap
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.storage.disk_space import reserve
from tandem.storage.folder_manifest import replace_file
from tandem.trainer.checkpoint.format.commit import MARKER, discard, sweep
from tandem.types import RunError

File = bytearray | mmap.mmap
KEEP_S = 86400.0
"""What a keeper has left behind on a node is removed by the next one there after so long."""
OWNER, LOCK = "owner.json", "lock"


@dataclass(frozen=True, slots=True)
class Owner:
    """The run whose checkpoints these are, and the newest incarnation of its trainer."""

    of: str = ""
    incarnation: int = 0


class KeptFiles:
    """Makes files, and those that a keeper had before in ``folder``, which this process has alone until it ends; ``None``: files are in this process."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def owner(self) -> Owner:
        """Returns whose files there are."""
        try:
            return Owner() if self.folder is None else Owner(**json.loads((self.folder / OWNER).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Owner()

    def set_owner(self, owner: Owner) -> None:
        if self.folder is not None:
            replace_file(self.folder / OWNER, json.dumps({"of": owner.of, "incarnation": owner.incarnation}))

    def earlier(self) -> dict[int, dict[str, File]]:
        """Returns the files of the whole checkpoints that are there, and removes the others."""
        if self.folder is None:
            return {}
        sweep(self.folder)
        whole = dict[int, dict[str, File]]()
        for path in self.folder.glob("step-*"):
            if (path / MARKER).exists():
                whole[int(path.name.removeprefix("step-"))] = {each.name: _mapped(each) for each in path.iterdir()}
            else:
                discard(path)
        return whole

    def make(self, step: int, name: str, size: int) -> File:
        """Returns a new file of ``size`` bytes, in the place of an earlier one. Raises ``RunError`` where there is no room."""
        if self.folder is None:
            return bytearray(size)
        if Path(name).name != name:
            raise RunError(f"'{name}' is not the name of a file of a checkpoint")
        path = self._step(step) / name
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.unlink(missing_ok=True)
            with path.open("x+b") as file:
                # Room for all of it now: a page that a full file system cannot give would end this process later.
                reserve(file.fileno(), size)
        except OSError as error:
            raise RunError(f"'{path}' of {size / 2**20:,.0f} MiB cannot be made: {error.strerror or error}") from None
        return _mapped(path)

    def uncommit(self, step: int) -> None:
        """A step that is taken again is none until it is committed again."""
        if self.folder is not None:
            (self._step(step) / MARKER).unlink(missing_ok=True)

    def committed(self) -> None:
        """The files are in use from now on for ``KEEP_S``."""
        if self.folder is not None:
            os.utime(self.folder / OWNER)

    def drop(self, step: int) -> None:
        if self.folder is not None and (path := self._step(step)).is_dir():
            discard(path)

    def _step(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"step-{step}"


def open_folder(parent: Path, run: str, node: str) -> tuple[Path, int]:
    """Returns the folder of one keeper of ``run`` on ``node`` below ``parent``, and the descriptor that holds its lock until this process ends. Removes what
    other runs have left behind there for longer than ``KEEP_S``. Raises ``OSError``."""
    home = parent / run
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in parent.glob("*/node-*"):
        if left.parent != home:
            _remove_old(left)
    number = 0
    while True:
        folder = home / (f"node-{node}" if not number else f"node-{node}.{number}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been removed meanwhile by who held it.
            if os.path.samestat(os.fstat(lock), (folder / LOCK).stat()):
                return folder, lock
        except BlockingIOError:
            # Of another keeper of this machine.
            number += 1
        except FileNotFoundError:
            pass
        os.close(lock)


def remove_folder(folder: Path) -> None:
    """Removes the folder of a keeper, and that of its run with the last of them."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        return


def _remove_old(folder: Path) -> None:
    try:
        if time.time() - (folder / OWNER).stat().st_mtime < KEEP_S:
            return
        with (folder / LOCK).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(folder)
    except OSError:
        return


def _mapped(path: Path) -> File:
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), size) if size else bytearray()
