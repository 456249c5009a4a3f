"""MLflow tracking: a server, or a database file beside the run's folder.

MLflow cannot remove points. It has the newest step of each metric, so that rows which a killed process had sent without recording it are not
sent twice. Infinite values become the largest float there.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from tandem.model_registry.mlflow import check_connection, mlflow_errors
from tandem.trackers.service_run import forget_service_run, keep_service_run, known_service_run
from tandem.trackers.tracker import RunFacts, SampleRow, Status, Value

SERVICE = "mlflow"
DATABASE, ARTEFACTS = "mlflow.db", "mlflow-artifacts"
"""Beside the run's folder, where no address is given."""
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000
"""Limits of one call."""


class Mlflow:
    """The MLflow run of a run, in the experiment ``experiment`` at ``uri``."""

    def __init__(self, experiment: str, uri: str) -> None:
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._run_id = ""
        self._has: dict[str, int] = {}
        self._metrics: list[Metric] = []

    def begin(self, facts: RunFacts, first_step: int) -> int:
        self._metrics = []
        with mlflow_errors(self._connect(facts)):
            run_id = known_service_run(facts.directory, SERVICE)
            is_new = run_id is None or not self._is_there(run_id)
            if run_id is None or is_new:
                tags = {"mlflow.runName": facts.name, "tandem.directory": str(facts.directory.resolve())}
                run_id = self._client.create_run(self._experiment_id(facts), tags=tags).info.run_id
                keep_service_run(facts.directory, SERVICE, run_id)
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            data = self._client.get_run(run_id).data
            self._has = {metric.key: int(metric.step) for metric in data.to_proto().metrics}
            self._log_config(facts.config, set(data.params))
        return 0 if is_new else first_step

    def restart(self, facts: RunFacts) -> None:
        """Deletes the MLflow run; until it is purged there, MLflow can restore it."""
        with mlflow_errors(self._connect(facts)):
            run_id = known_service_run(facts.directory, SERVICE)
            if run_id is not None and self._is_there(run_id):
                self._client.delete_run(run_id)
        forget_service_run(facts.directory, SERVICE)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        parts = sorted({name for row in rows for name in row.parts})
        data = [[row.prompt, row.completion, row.reward, *(row.parts.get(name) for name in parts)] for row in rows]
        # A file for each step, in the format of MLflow's tables: written twice it is the same.
        table = {"columns": ["prompt", "completion", "reward", *parts], "data": data}
        self._client.log_dict(self._run_id, table, f"samples/step_{step:08d}.json")

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        now_ms = int(time.time() * 1000)
        for name, value in metrics.items():
            key = re.sub(r"[^\w\-. /:]", "_", name)
            if name != "step" and isinstance(value, int | float) and step > self._has.get(key, -1):
                self._metrics.append(Metric(key, float(value), now_ms, step))

    def flush(self) -> None:
        check_connection(self._uri)
        metrics, self._metrics = self._metrics, []
        with mlflow_errors(self._uri):
            for first in range(0, len(metrics), _MOST_METRICS):
                self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])

    def artefact(self, path: Path) -> None:
        with mlflow_errors(self._uri):
            self._client.set_tag(self._run_id, f"tandem.{path.stem}", str(path.resolve()))
            if path.is_file():
                self._client.log_artifact(self._run_id, str(path))

    def finish(self, status: Status) -> None:
        if self._run_id:
            check_connection(self._uri)
            with mlflow_errors(self._uri):
                self._client.set_terminated(self._run_id, "FINISHED" if status == "finished" else "KILLED")

    def _connect(self, facts: RunFacts) -> str:
        self._uri = self._uri or f"sqlite:///{facts.directory.resolve().parent / DATABASE}"
        check_connection(self._uri)
        if self._client is None:
            with mlflow_errors(self._uri):
                self._client = MlflowClient(tracking_uri=self._uri)
        return self._uri

    def _experiment_id(self, facts: RunFacts) -> str:
        there = self._client.get_experiment_by_name(self._experiment)
        if there is not None:
            return str(there.experiment_id)
        folder = (facts.directory.resolve().parent / ARTEFACTS).as_uri() if self._uri.startswith("sqlite:") else None
        return str(self._client.create_experiment(self._experiment, artifact_location=folder))

    def _is_there(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _log_config(self, config: Mapping[str, Any], logged: set[str]) -> None:
        """The recipe: a file, which has the values of the newest life, and parameters, which cannot be changed."""
        self._client.log_dict(self._run_id, dict(config), "config.yaml")
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _flat(config) if key not in logged]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
