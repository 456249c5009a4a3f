"""A registry of our own: ``registry.sqlite`` in a folder, and in ``models/NAME/NUMBER`` the files of versions that were promoted.

A checkpoint that is entered stays where its run keeps it, and goes when the run prunes it. One that is promoted to staging or
production is kept here, by hard links where the disk is the same. Every row is covered by a chain of digests. The paths of versions that are kept
are stored relative to the registry's folder, so that they mean the same from any folder and after a move.
"""

import json
import os
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tandem.model_registry.files import check_files
from tandem.model_registry.versions import NewVersion, Stage, Version, stage_named
from tandem.runtime.records.chained_tables import CHAIN_SCHEMA, ChainedTables, Table
from tandem.runtime.records.sqlite_file import connect, errors
from tandem.types import RunError, UserError

_LAYOUT = 2
_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS versions (
    name TEXT NOT NULL, number INTEGER NOT NULL, stage TEXT NOT NULL, created_s REAL NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
    step INTEGER NOT NULL, run TEXT NOT NULL, parent TEXT NOT NULL, recipe TEXT NOT NULL, data TEXT NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (name, number), UNIQUE (name, digest));
CREATE TABLE IF NOT EXISTS promotions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, number INTEGER NOT NULL, stage TEXT NOT NULL, time_s REAL NOT NULL);
"""
    + CHAIN_SCHEMA
)
_COLUMNS = ("name", "number", "stage", "created_s", "path", "digest", "step", "run", "parent", "recipe", "data", "metrics")
_TABLES = {"versions": Table(_COLUMNS, keys=2), "promotions": Table(("id", "name", "number", "stage", "time_s"))}
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
        self._tables = ChainedTables(self._connection, self._path, _TABLES)

    def close(self) -> None:
        self._tables.close()
        self._connection.close()

    def check(self) -> None:
        """Raises ``RunError`` if a row is not as it was written."""
        with errors(self._path, "the model registry"):
            damaged = [row for row in self._tables.verify() if row.part not in ("head", "unflushed")]
        if damaged:
            first, more = damaged[0], f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
            raise RunError(f"the model registry: {self._path} is damaged: {first.part} {first.key}: {first.what}{more}; restore it from a copy")

    def register(self, entry: NewVersion) -> Version:
        with errors(self._path, "the model registry"), self._tables.writing(is_durable=True):
            there = self._rows("WHERE name = ? AND digest = ?", entry.name, entry.digest)
            if there:
                return there[0]
            [(number,)] = self._connection.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM versions WHERE name = ?", (entry.name,))
            version = Version(number, "none", time.time(), entry)
            self._put(version, "none", entry.path)
            return version

    def versions(self, name: str = "") -> list[Version]:
        with errors(self._path, "the model registry"):
            return self._rows("WHERE name = ? OR ? = ''", name, name)

    def promote(self, version: Version, stage: Stage) -> Version:
        """Moves ``version`` to ``stage``, after all of its files were verified if the registry keeps it there. Raises ``UserError`` if they no
        longer exist, and ``RunError`` if they, or the registry, are damaged."""
        self.check()
        path = version.entry.path
        if stage in _KEPT:
            check_files(version)
            path = self._keep(version)
        with errors(self._path, "the model registry"), self._tables.writing(is_durable=True):
            if stage == "production":
                for former in self._rows("WHERE name = ? AND stage = 'production' AND number <> ?", version.entry.name, version.number):
                    self._set(former, "archived", former.entry.path)
            self._set(version, stage, path)
        return replace(version, stage=stage, entry=replace(version.entry, path=path))

    def _set(self, version: Version, stage: Stage, path: str) -> None:
        self._put(version, stage, path)
        self._tables.put("promotions", (None, version.entry.name, version.number, stage, time.time()))

    def _put(self, version: Version, stage: Stage, path: str) -> None:
        entry, kept = version.entry, Path(path).resolve()
        folder = self.folder.resolve()
        stored = str(kept.relative_to(folder)) if kept.is_relative_to(folder) else path
        row = (
            entry.name, version.number, stage, version.created_s, stored, entry.digest, entry.step, entry.run, entry.parent,
            json.dumps(dict(entry.recipe)), json.dumps(dict(entry.data)), json.dumps(dict(entry.metrics)),
        )  # fmt: skip
        self._tables.put("versions", row)

    def _rows(self, where: str, *values: object) -> list[Version]:
        with closing(self._connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM versions {where} ORDER BY name, number", values)) as cursor:
            rows = cursor.fetchall()
        return [self._version(*row) for row in rows]

    def _version(
        self, name: str, number: int, stage: str, created_s: float, path: str, digest: str, step: int, run: str, parent: str, recipe: str, data: str,
        metrics: str,
    ) -> Version:  # fmt: skip
        try:
            facts = [json.loads(text) for text in (recipe, data, metrics)]
        except ValueError:
            raise RunError(f"the model registry: {self._path} is damaged: version {name}/{number} cannot be read; restore it from a copy") from None
        # A relative path is one of a version that is kept here.
        whole = path if Path(path).is_absolute() else str(self.folder.resolve() / path)
        return Version(number, stage_named(stage), created_s, NewVersion(name, whole, digest, step, run, facts[0], facts[1], parent, facts[2]))

    def _keep(self, version: Version) -> str:
        source, final = Path(version.entry.path), self.folder / "models" / version.entry.name / str(version.number)
        if final.is_dir():
            return str(final)
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
