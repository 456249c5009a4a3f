"""A registry of our own: ``registry.sqlite`` in a folder, and in ``models/NAME/NUMBER`` the files of versions that were promoted.

A checkpoint that is entered stays where its run keeps it, and goes when the run prunes it. One that is promoted to staging or
production is kept here, by hard links where the disk is the same.
"""

import json
import os
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tandem.model_registry.versions import NewVersion, Stage, Version, stage_named
from tandem.runtime.records.sqlite_file import connect, errors, transaction
from tandem.types import RunError, UserError

_LAYOUT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    name TEXT NOT NULL, number INTEGER NOT NULL, stage TEXT NOT NULL, created_s REAL NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
    step INTEGER NOT NULL, run TEXT NOT NULL, parent TEXT NOT NULL, recipe TEXT NOT NULL, data TEXT NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (name, number), UNIQUE (name, digest));
CREATE TABLE IF NOT EXISTS promotions (
    name TEXT NOT NULL, number INTEGER NOT NULL, stage TEXT NOT NULL, time_s REAL NOT NULL)
"""
_COLUMNS = "number, stage, created_s, name, path, digest, step, run, recipe, data, parent, metrics"
_KEPT: tuple[Stage, ...] = ("staging", "production")


class LocalRegistry:
    """The registry in ``folder``. Any process may use it; SQLite orders them."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        self._path = folder / "registry.sqlite"
        try:
            if create:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the registry's folder '{folder}' cannot be made: {error.strerror}; name another one") from None
        if not create and not self._path.is_file():
            raise UserError(f"'{folder}' holds no registry; name the folder that 'registry.path' of a recipe names")
        if not create and self._path.stat().st_size == 0:
            raise RunError(f"the model registry: {self._path} is empty, as no registry is; restore it from a copy")
        self._connection = connect(self._path, "the model registry", _LAYOUT, _SCHEMA)

    def close(self) -> None:
        self._connection.close()

    def register(self, entry: NewVersion) -> Version:
        with errors(self._path, "the model registry"), transaction(self._connection):
            there = self._rows("WHERE name = ? AND digest = ?", entry.name, entry.digest)
            if there:
                return there[0]
            [(number,)] = self._connection.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM versions WHERE name = ?", (entry.name,))
            version = Version(number, "none", time.time(), entry)
            self._connection.execute(
                f"INSERT INTO versions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    number, "none", version.created_s, entry.name, entry.path, entry.digest, entry.step, entry.run,
                    json.dumps(dict(entry.recipe)), json.dumps(dict(entry.data)), entry.parent, json.dumps(dict(entry.metrics)),
                ),
            )  # fmt: skip
            return version

    def versions(self, name: str = "") -> list[Version]:
        with errors(self._path, "the model registry"):
            return self._rows("WHERE name = ? OR ? = ''", name, name)

    def promote(self, version: Version, stage: Stage) -> Version:
        """Moves ``version`` to ``stage``. Raises ``UserError`` if its files must be kept and no longer exist."""
        path = self._keep(version) if stage in _KEPT else version.entry.path
        with errors(self._path, "the model registry"), transaction(self._connection):
            if stage == "production":
                for former in self._rows("WHERE name = ? AND stage = 'production' AND number <> ?", version.entry.name, version.number):
                    self._set(former, "archived", former.entry.path)
            self._set(version, stage, path)
        return replace(version, stage=stage, entry=replace(version.entry, path=path))

    def _set(self, version: Version, stage: Stage, path: str) -> None:
        where = (version.entry.name, version.number)
        self._connection.execute("UPDATE versions SET stage = ?, path = ? WHERE name = ? AND number = ?", (stage, path, *where))
        self._connection.execute("INSERT INTO promotions VALUES (?, ?, ?, ?)", (*where, stage, time.time()))

    def _rows(self, where: str, *values: object) -> list[Version]:
        with closing(self._connection.execute(f"SELECT {_COLUMNS} FROM versions {where} ORDER BY name, number", values)) as cursor:
            rows = cursor.fetchall()
        return [
            Version(
                number, stage_named(stage), created_s,
                NewVersion(name, path, digest, step, run, json.loads(recipe), json.loads(data), parent, json.loads(metrics)),
            )
            for number, stage, created_s, name, path, digest, step, run, recipe, data, parent, metrics in rows
        ]  # fmt: skip

    def _keep(self, version: Version) -> str:
        source, final = Path(version.entry.path), self.folder / "models" / version.entry.name / str(version.number)
        if final.is_dir():
            return str(final)
        if not source.is_dir():
            raise UserError(f"the files of '{version.reference}' no longer exist in '{source}' (its run has pruned them); promote a version whose files exist")
        fresh = final.with_name(f".{final.name}.tmp")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            shutil.copytree(source, fresh, copy_function=_link)
            fresh.rename(final)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise RunError(f"'{version.reference}' cannot be kept in '{final}': {error.strerror or error}; make room and promote it again") from None
        return str(final)


def _link(source: str, target: str) -> None:
    # A committed file is never changed, so two names may share its bytes.
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
