"""The name under which nodes keep a run's checkpoints before its folder has them: on their disks (``checkpoint.local_directory``) and in their memory."""

import secrets
import shutil
from pathlib import Path

from tandem.runtime.records.journal import Journal

KEY = "local_checkpoints"
"""The journal's key of the name. Another run in a folder of the same name has another one, and so has one that does not trust what is there."""


def kept_name(directory: Path, journal: Journal) -> str:
    """Returns the name for the run in ``directory``, made once."""
    name: str | None = journal.get(KEY)
    if name is None:
        name = f"{directory.resolve().name}-{secrets.token_hex(4)}"
        journal.set(KEY, name)
    return name


def local_folder(local_directory: str, directory: Path, journal: Journal) -> Path | None:
    """Returns the folder for the run in ``directory``, ``None`` without a ``local_directory``. It need not exist."""
    return Path(local_directory) / kept_name(directory, journal) if local_directory else None


def forget_local(local_directory: str, journal: Journal) -> None:
    """Removes the folder of a run that has finished, or does not trust it, as far as it is on this machine. The next one has another name, under which no
    keeper has anything either."""
    name = journal.get(KEY)
    if name is None:
        return
    journal.set(KEY, None)
    if local_directory:
        shutil.rmtree(Path(local_directory) / name, ignore_errors=True)
