"""How the last job of a run has ended: ``launch/ended.json`` in its folder, for schedulers that do not remember it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.cluster.launch.record import FOLDER
from tandem.storage.folder_manifest import replace_file

_FILE = "ended.json"


@dataclass(frozen=True, slots=True)
class Ended:
    """``exit_status``: see ``tandem.cluster.launch.job``; ``CANCELLED`` for a job that was ended at once."""

    job: str
    exit_status: int


CANCELLED = 137


def write_end(directory: Path, ended: Ended) -> None:
    """Writes the end of a job by one atomic rename. A folder that was removed meanwhile is not made again."""
    replace_file(directory / FOLDER / _FILE, json.dumps(asdict(ended)) + "\n")


def read_end(directory: Path, job: str) -> Ended | None:
    """Returns how ``job`` has ended; ``None`` while it has not, or if that was not written."""
    try:
        ended = Ended(**json.loads((directory / FOLDER / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return ended if ended.job == job else None
