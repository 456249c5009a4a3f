"""Which launcher placed a run: ``launch/record.json`` in its folder, for its user alone, as are the secrets beside it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.cluster.launch.launcher import LAUNCHERS, LauncherName
from tandem.runtime.rpc.credentials import new_credential, write_credential
from tandem.storage.folder_manifest import replace_file
from tandem.types import RunError, UserError

FOLDER = "launch"
CREDENTIAL, PASSWORD = "pods.secret", "etcd.password"
_RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class Record:
    """``job``: the scheduler's id. ``starts_etcd``: the run has no etcd of its own, so the job starts one. ``folder``: in which the command was given.
    ``overrides``: new values of a resume. ``address``: of the scheduler; empty: that of this machine, or one that was started for the job."""

    launcher: LauncherName
    job: str = ""
    starts_etcd: bool = False
    folder: str = ""
    overrides: tuple[str, ...] = ()
    address: str = ""


def read_record(directory: Path) -> Record | None:
    """Returns the record of the run in ``directory``; ``None`` for one that no scheduler has placed. Raises ``UserError`` if ``directory`` is not a run."""
    if not (directory / "config.yaml").is_file():
        raise UserError(f"'{directory}' is not a run: it has no config.yaml; name a folder under runs/")
    try:
        data = json.loads((directory / FOLDER / _RECORD).read_text(encoding="utf-8"))
        record = Record(**{**data, "overrides": tuple(data["overrides"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise RunError(f"'{directory / FOLDER / _RECORD}' is damaged; remove it, and end the run's job by the scheduler's own command") from None
    if record.launcher not in LAUNCHERS:
        raise UserError(f"'{directory}' was launched on {record.launcher} by another version of Tandem; use that version")
    return record


def write_record(directory: Path, record: Record) -> None:
    """Writes the record by one atomic rename."""
    path = directory / FOLDER / _RECORD
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, json.dumps(asdict(record), indent=2) + "\n")


def write_secrets(directory: Path) -> None:
    """Makes the secrets of the run's pods and of its etcd, unless they are there."""
    folder = directory / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in (CREDENTIAL, PASSWORD):
        if not (folder / name).exists():
            write_credential(folder / name, new_credential())
