"""MLflow's model registry behind the same calls. A version's stage is an alias there, which MLflow has in place of its former stages;
lineage and metrics are tags."""

import json
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from tandem.model_registry.files import check_files
from tandem.model_registry.versions import NewVersion, Stage, Version, stage_named
from tandem.storage.files import one_line_errors
from tandem.types import RunError, UserError

_PREFIX = "tandem."
_CONNECT_S = 5.0
"""Seconds to wait for a connection. MLflow's own client retries for minutes, during which a run would be blocked."""


class MlflowRegistry:
    """The registry at MLflow's tracking address ``uri``. Raises ``UserError`` where the package is not installed, and ``RunError`` where no
    server answers there."""

    def __init__(self, uri: str) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise UserError(f"the registry '{uri}' needs MLflow, which is not installed; pip install 'tandem-rl[mlflow]'") from None
        self._uri = uri
        check_connection(uri)
        with mlflow_errors(uri):
            self._client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def close(self) -> None:
        """Nothing is held."""

    def register(self, entry: NewVersion) -> Version:
        check_connection(self._uri)
        there = [version for version in self.versions(entry.name) if version.entry.digest == entry.digest]
        if there:
            return there[0]
        with mlflow_errors(self._uri):
            if not self._client.search_registered_models(f"name = '{entry.name}'"):
                self._client.create_registered_model(entry.name)
            tags = {f"{_PREFIX}{name}": value for name, value in _tags(entry).items()}
            created = self._client.create_model_version(entry.name, source=entry.path, tags={**tags, f"{_PREFIX}stage": "none"})
        return _version(created)

    def versions(self, name: str = "") -> list[Version]:
        with mlflow_errors(self._uri):
            entries: list[Any] = []
            token = None
            while True:
                page = self._client.search_model_versions(f"name = '{name}'" if name else None, max_results=200, page_token=token)
                entries += page
                token = page.token
                if not token:
                    break
        ours = (version for version in entries if f"{_PREFIX}digest" in version.tags)
        return sorted(map(_version, ours), key=lambda version: (version.entry.name, version.number))

    def check(self) -> None:
        """MLflow keeps no digests of its rows."""

    def promote(self, version: Version, stage: Stage) -> Version:
        name = version.entry.name
        if stage in ("staging", "production"):
            check_files(version)
        with mlflow_errors(self._uri):
            if stage == "production":
                for former in self.versions(name):
                    if former.stage == "production" and former.number != version.number:
                        self._set(former, "archived")
            self._set(version, stage)
        return replace(version, stage=stage)

    def _set(self, version: Version, stage: Stage) -> None:
        name, number = version.entry.name, str(version.number)
        for alias, held in self._client.get_registered_model(name).aliases.items():
            if alias in ("staging", "production") and str(held) == number:
                self._client.delete_registered_model_alias(name, alias)
        if stage in ("staging", "production"):
            self._client.set_registered_model_alias(name, stage, number)
        self._client.set_model_version_tag(name, number, f"{_PREFIX}stage", stage)


def _tags(entry: NewVersion) -> dict[str, str]:
    return {
        "digest": entry.digest, "step": str(entry.step), "run": entry.run, "parent": entry.parent, "recipe": json.dumps(dict(entry.recipe)),
        "data": json.dumps(dict(entry.data)), "metrics": json.dumps(dict(entry.metrics)),
    }  # fmt: skip


def _version(row: Any) -> Version:
    tags: Mapping[str, str] = {key.removeprefix(_PREFIX): value for key, value in row.tags.items()}
    entry = NewVersion(
        row.name, row.source, tags["digest"], int(tags["step"]), tags["run"], json.loads(tags["recipe"]), json.loads(tags["data"]),
        tags["parent"], json.loads(tags["metrics"]),
    )  # fmt: skip
    return Version(int(row.version), stage_named(tags["stage"]), row.creation_timestamp / 1000, entry)


def check_connection(uri: str) -> None:
    """Raises ``RunError`` where no server accepts connections at the address ``uri``; other kinds of ``uri`` are not checked."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return
    try:
        socket.create_connection((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise RunError(f"no MLflow server answers at '{uri}' ({error}); start it, or name another address") from None


def mlflow_errors(uri: str) -> AbstractContextManager[None]:
    """Raises ``RunError`` of one line for any error of MLflow."""
    return one_line_errors(f"MLflow at '{uri}'")
