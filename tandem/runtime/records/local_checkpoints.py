"""The folder of a run's checkpoints on a disk of its node (``checkpoint.local_directory``)."""

import secrets
import shutil
from pathlib import Path

from tandem.runtime.records.journal import Journal

KEY = "local_checkpoints"
"""The journal's key of the folder's name. Another run of the same name has another one, and so has one that does not trust what is there."""


def local_folder(local_directory: str, directory: Path, journal: Journal) -> Path | None:
    """Returns the folder for the run in ``directory``, ``None`` without a ``local_directory``. It need not exist."""
    if not local_directory:
        return None
    name: str | None = journal.get(KEY)
    if name is None:
        name = f"{directory.resolve().name}-{secrets.token_hex(4)}"
        journal.set(KEY, name)
    return Path(local_directory) / name


def forget_local(local_directory: str, journal: Journal) -> None:
    """Removes the folder of a run that has finished, or does not trust it, as far as it is on this machine. The next one has another name."""
    name = journal.get(KEY)
    if name is None:
        return
    journal.set(KEY, None)
    if local_directory:
        shutil.rmtree(Path(local_directory) / name, ignore_errors=True)
