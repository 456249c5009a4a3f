"""The keepers that a launcher has started on the nodes of a run, and that outlive its controller: ``keepers/NAME.json`` in the run's folder, which its machines
share. So the next controller finds them where the coordination store was lost with the first node. Imports no torch."""

import contextlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.storage.folder_manifest import replace_file

FOLDER = "keepers"
_CONNECT_S = 2.0


def keeper_path(directory: Path, name: str) -> Path:
    """Returns the file of the keeper ``name``."""
    return directory / FOLDER / f"{name}.json"


def write_keeper(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes where a keeper is, as of ``KeeperProcess.start``, by one atomic rename, unless that is there."""
    path, text = keeper_path(directory, str(facts["name"])), json.dumps(dict(facts))
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, text)


def remove_keeper(directory: Path, facts: Mapping[str, Any]) -> None:
    """Removes what ``write_keeper`` wrote, unless another keeper has taken the name."""
    path = keeper_path(directory, str(facts["name"]))
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8") == json.dumps(dict(facts)):
            path.unlink()
            path.parent.rmdir()


def read_keeper(path: Path) -> dict[str, Any]:
    """Returns where the keeper of the file ``path`` is. Raises ``OSError`` and ``ValueError``."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def launched_keepers(directory: Path) -> list[dict[str, Any]]:
    """Returns the keepers that answer at their addresses, by name: a node that was lost left its file behind."""
    keepers = []
    for path in sorted((directory / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            facts = read_keeper(path)
            with socket.create_connection((str(facts["host"]), int(facts["port"])), timeout=_CONNECT_S):
                keepers.append(facts)
    return keepers
