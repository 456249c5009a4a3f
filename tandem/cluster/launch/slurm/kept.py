"""What the nodes of a job of Slurm keep of its run's checkpoints, in ``checkpoint.memory_directory`` and ``checkpoint.local_directory``, and when it is
removed: ``python -m tandem.cluster.launch.slurm.kept RUN`` does so on this node, for the run RUN that its user has ended.

Slurm ends every process of a job that it loses, or that ``scancel`` ends, so what they kept stays. A mark beside it names the run's folder, by which the next
job of this user on the node finds what belongs to no job any more.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tandem.cluster.launch.job import exit_status, read_job
from tandem.cluster.launch.record import read_record
from tandem.cluster.launch.slurm.commands import find_job
from tandem.config.checkpoint import CheckpointConfig
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.local_checkpoints import KEY
from tandem.runtime.records.run_lock import RunLock
from tandem.trainer.checkpoint.memory.kept_files import LOCK, OWNER, remove_folder
from tandem.types import RunError, UserError


@dataclass(frozen=True, slots=True)
class KeptHere:
    """The folder ``parent`` of this node, with what runs keep in it."""

    parent: Path

    @property
    def _marks(self) -> Path:
        # Users share a disk, and none may name what another one keeps.
        return self.parent / f".tandem-runs-{os.getuid()}"

    def _mark_of(self, directory: Path) -> Path:
        return self._marks / f"{directory.name}-{blake2b(bytes(directory), digest_size=4).hexdigest()}.json"

    def mark(self, directory: Path) -> None:
        """Names the run in ``directory`` as one that keeps checkpoints here. Raises ``OSError``."""
        self._marks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mark_of(directory).write_text(json.dumps({"run": str(directory)}), encoding="utf-8")

    def settle(self, directory: Path) -> None:
        """Removes the mark of the run if it keeps nothing here any more."""
        if not self._of(directory):
            self._unmark(directory)

    def remove(self, directory: Path) -> list[Path]:
        """Removes what the run in ``directory`` keeps here and no process uses, with its mark, and returns the folders."""
        removed = [path for path in self._of(directory) if _remove(path)]
        self.settle(directory)
        return removed

    def others(self, directory: Path) -> Iterator[Path]:
        """Yields the folders of the runs that are named here, but for that in ``directory``."""
        for path in sorted(self._marks.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if (other := Path(json.loads(path.read_text(encoding="utf-8"))["run"])) != directory:
                    yield other

    def _of(self, directory: Path) -> list[Path]:
        """Returns the folders with what the run keeps here: those of its keepers, and that of its ranks, by the name in the run's journal. Where that has none,
        because the run has finished or its folder was removed, they are those of the run's own name, unless another run of that name is marked."""
        keepers, kept = sorted((self.parent / directory.name).glob("node-*")), _kept_name(directory)
        if kept is not None:
            keepers = [path for path in keepers if _owner(path) in ("", kept)]
            return [*keepers, *([self.parent / kept] if (self.parent / kept).is_dir() else [])]
        if any(other.name == directory.name for other in self.others(directory)):
            return []
        own = re.compile(re.escape(directory.name) + r"-[0-9a-f]{8}")
        of_ranks = [] if directory.exists() else [path for path in self.parent.glob(f"{directory.name}-*") if own.fullmatch(path.name)]
        return [*(path for path in keepers if own.fullmatch(_owner(path))), *of_ranks]

    def _unmark(self, directory: Path) -> None:
        self._mark_of(directory).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._marks.rmdir()


def folders_of(checkpoint: CheckpointConfig) -> list[KeptHere]:
    """Returns the folders in which nodes keep checkpoints of a run."""
    return [KeptHere(Path(each)) for each in dict.fromkeys((checkpoint.memory_directory, checkpoint.local_directory)) if each]


@contextlib.contextmanager
def kept_on_node(checkpoint: CheckpointConfig, directory: Path, node: str) -> Iterator[None]:
    """Inside, the run in ``directory`` may keep checkpoints on this ``node``. What runs without a job have left there is removed before, and said."""
    folders = folders_of(checkpoint)
    for folder in folders:
        try:
            for other in folder.others(directory):
                if not _may_go_on(other) and folder.remove(other):
                    print(f"node {node}: removed the checkpoints in {folder.parent} of '{other}', which has no job any more", flush=True)
            folder.mark(directory)
        except OSError as error:
            print(f"node {node}: what other runs have left in {folder.parent} cannot be looked at: {error.strerror or error}", flush=True)
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.settle(directory)


def _may_go_on(directory: Path) -> bool:
    """Returns whether the run in ``directory`` has a job, queued or running, or a process, or may have one that is not known here."""
    if not directory.exists():
        return False
    try:
        record = read_record(directory)
        if record is None or record.launcher != "slurm":
            return True
        job = find_job(record.job) if record.job else None
        if job is not None and (job.is_queued or job.is_running):
            return True
        RunLock(directory).release()
    except (UserError, RunError, OSError):
        return True
    return False


def _kept_name(directory: Path) -> str | None:
    """Returns the name of what nodes keep of the run; ``None`` where its journal says none."""
    if not (path := directory / "journal.sqlite").is_file():
        return None
    try:
        with Journal(path, read_only=True, brief=True) as journal:
            name = journal.get(KEY)
    except RunError:
        return None
    return None if name is None else str(name)


def _owner(keeper: Path) -> str:
    """Returns the run whose checkpoints are in the folder of a keeper; empty where it has none yet."""
    try:
        return str(json.loads((keeper / OWNER).read_text(encoding="utf-8")).get("of", ""))
    except (OSError, ValueError):
        return ""


def _remove(path: Path) -> bool:
    """Removes a folder, unless a keeper that lives has it or it is another user's. Returns whether it did."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
        if not (path / LOCK).exists():
            shutil.rmtree(path)
            return True
        with (path / LOCK).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(path)
    except OSError:
        return False
    return True


def main() -> int:
    directory = Path(sys.argv[1])

    def run() -> int:
        _, recipe = read_job(directory)
        for folder in folders_of(recipe.checkpoint):
            folder.remove(directory)
        return 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
