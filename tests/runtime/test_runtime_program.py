"""How a person starts ``tandem`` again."""

import os
import sys
from pathlib import Path

import pytest

from tandem.runtime.process.program import program


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in the working directory that is not activated."""
    scripts = tmp_path / "my venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "python").touch()
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    return scripts


def script(folder: Path) -> None:
    (folder / "tandem").touch()
    (folder / "tandem").chmod(0o700)


def test_the_command_is_shown_by_its_name_only_where_the_path_leads_to_it(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(environment)
    assert program() == "'my venv/bin/tandem'"
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert program() == f"'{environment}/tandem'"
    script(other)
    monkeypatch.setenv("PATH", str(other))
    assert program() == f"'{environment}/tandem'"
    monkeypatch.setenv("PATH", os.pathsep.join((str(environment), str(other))))
    assert program() == "tandem"


def test_an_environment_without_the_script_is_shown_by_its_python(environment: Path) -> None:
    assert program() == "'my venv/bin/python' -m tandem"
