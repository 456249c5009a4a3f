"""The name that a run has at a service: an identifier in a file of the run's folder, the same for all lives of the run."""

import uuid
from pathlib import Path

from tandem.storage.folder_manifest import replace_file


def service_run(directory: Path, service: str) -> str:
    """Returns the identifier of the run in ``directory`` at ``service``, new where it has none."""
    path = _path(directory, service)
    if not path.exists() or not path.read_text("ascii").strip():
        keep_service_run(directory, service, uuid.uuid4().hex[:16])
    return path.read_text("ascii").strip()


def keep_service_run(directory: Path, service: str, identifier: str) -> None:
    """Records the identifier that ``service`` gave to the run."""
    path = _path(directory, service)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, f"{identifier}\n")


def known_service_run(directory: Path, service: str) -> str | None:
    """Returns the identifier if there is one."""
    path = _path(directory, service)
    return path.read_text("ascii").strip() or None if path.exists() else None


def forget_service_run(directory: Path, service: str) -> None:
    """Makes the run a new one at ``service``."""
    _path(directory, service).unlink(missing_ok=True)


def _path(directory: Path, service: str) -> Path:
    return directory / "trackers" / f"{service}.id"
