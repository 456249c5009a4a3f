"""The nodes of a run as its folder tells of them: of the preflight and of the journal, on any launcher. Reads only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.health.preflight import FILE
from tandem.cluster.launch.record import FOLDER
from tandem.runtime.records.journal import Journal


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """``state``: ``in use``, ``spare``, ``cordoned`` or ``gone``. ``reason``: of a cordon."""

    node: str
    state: str
    reason: str = ""


def read_nodes(directory: Path) -> Sequence[NodeStatus]:
    """Returns the newest state of each node of the run in ``directory`` beside that of its controller, by name; none for a run on one node."""
    found: dict[str, NodeStatus] = {}
    try:
        told = json.loads((directory / FOLDER / FILE).read_text(encoding="utf-8"))
        found = {each["node"]: NodeStatus(each["node"], "cordoned", each["text"]) for each in told["found"]}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    path = directory / "journal.sqlite"
    if path.is_file():
        with Journal(path, read_only=True) as journal:
            for event in journal.events():
                if event.kind in ("node", "cordon"):
                    found[event.detail["node"]] = NodeStatus(event.detail["node"], event.detail["state"], event.detail.get("reason", ""))
    return [found[node] for node in sorted(found)]
