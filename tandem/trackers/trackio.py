"""trackio: its SQLite database on this machine (``TRACKIO_DIR``, by default below ``~/.cache/huggingface``), by the package ``trackio``.

Rows are written by its storage class, in one transaction for each flush; ``trackio.log`` would queue them in a thread.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trackio import Artifact, Table
from trackio.sqlite_storage import SQLiteStorage

from tandem.trackers.service_run import service_run
from tandem.trackers.tracker import RunFacts, SampleRow, Status, Value

SERVICE = "trackio"


class Trackio:
    """The trackio run of a run, in ``project``."""

    def __init__(self, project: str) -> None:
        self._project, self._name, self._id = project, "", ""
        self._config: dict[str, Any] | None = None
        self._rows: list[tuple[int, str, dict[str, Any]]] = []
        self._samples: dict[int, Any] = {}

    def begin(self, facts: RunFacts, first_step: int) -> int:
        SQLiteStorage.validate_project_name(self._project)
        self._name, self._id, self._config, self._rows = facts.name, service_run(facts.directory, SERVICE), dict(facts.config), []
        newest = SQLiteStorage.get_max_step_for_run(self._project, self._name, self._id)
        if newest == first_step - 1 or (newest is None and first_step == 0):
            return first_step
        # It has no call that removes some steps of a run, so that all rows are written again.
        if newest is not None and not SQLiteStorage.delete_run(self._project, self._name, self._id):
            raise OSError(f"the run '{self._name}' cannot be removed from {SQLiteStorage.get_project_db_path(self._project)}")
        return 0

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        data = [{"prompt": row.prompt, "completion": row.completion, "reward": row.reward, **row.parts} for row in rows]
        self._samples[step] = Table(data=data)._to_dict(project=self._project, run=self._name, step=step)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        row: dict[str, Any] = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        if step in self._samples:
            row["samples"] = self._samples.pop(step)
        self._rows.append((step, datetime.now(UTC).isoformat(), row))

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            steps, times, metrics = map(list, zip(*rows, strict=True))
            SQLiteStorage.bulk_log(self._project, self._name, metrics, steps, times, self._config, run_id=self._id)
            self._config = None

    def artefact(self, path: Path) -> None:
        artefact = Artifact(f"{path.stem}-{self._id}", type="model" if path.is_dir() else "report")
        # A reference: nothing is copied.
        artefact.add_reference(path.resolve().as_uri(), checksum=False, name=path.name)
        SQLiteStorage.commit_artifact_version(
            project=self._project, name=artefact.name, type=artefact.type, description=None, manifest=artefact._build_manifest(self._project),
            metadata={"path": os.fspath(path.resolve())}, aliases=[], run_name=self._name, run_id=self._id,
        )  # fmt: skip

    def finish(self, status: Status) -> None:
        """Has nothing open."""
