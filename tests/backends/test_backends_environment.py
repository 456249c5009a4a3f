"""Environments of sidecars: made with the real pip from a wheel of the test, found, and refused in one line when they are not whole."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.backends.environment import RECORD, folder_of, install, installed, python_of, tandem_path
from tandem.backends.new_environment import NewEnvironment
from tandem.backends.sidecars import SIDECARS
from tandem.types import UserError


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of one module, as small as the format allows."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "import sys\nprefix = sys.prefix\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def sidecars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of environments; the one of DeepSpeed has a module of that name from a local wheel, and nothing else."""
    wheel(tmp_path, "deepspeed", "9.8.7")
    # The first setting of each is that of the machine, which may add other sources.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("TANDEM_SIDECARS", str(tmp_path / "sidecars é"))
    fake = replace(SIDECARS["deepspeed"], install=lambda environment: environment.install("deepspeed"), imports=("deepspeed",))
    monkeypatch.setitem(SIDECARS, "deepspeed", fake)
    return tmp_path / "sidecars é"


@pytest.mark.full
def test_an_environment_is_made_once_has_its_own_packages_and_finds_tandem_beside_them(sidecars: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^'trainer.backend' is 'deepspeed'.*tandem sidecar install deepspeed$"):
        python_of("deepspeed")
    record = install("deepspeed")
    assert record.versions == {"deepspeed": "9.8.7"} and installed("deepspeed") == record
    assert install("deepspeed") == record, "it was made again"
    code = "import deepspeed, tandem, importlib.util as u; print(deepspeed.prefix, tandem.__file__, u.find_spec('pytest'))"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": tandem_path(tmp_path / "run")}
    out = subprocess.run([str(python_of("deepspeed")), "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert out.split("/")[-1].split()[-1] == "None", "a package of this environment is found in that of the sidecar"
    assert str(folder_of("deepspeed")) in out and f"{tmp_path}/run/python/tandem/__init__.py" in out

    (folder_of("deepspeed") / RECORD).write_text(json.dumps({"format": 0}))
    with pytest.raises(UserError, match=r"not whole.*tandem sidecar install deepspeed --force$"):
        python_of("deepspeed")
    (folder_of("deepspeed") / RECORD).unlink()
    with pytest.raises(UserError, match=r"its installation did not end.*tandem sidecar install deepspeed$"):
        python_of("deepspeed")


def test_an_installation_that_fails_is_one_line_with_pips_reason_and_is_not_taken_for_whole(sidecars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(environment: NewEnvironment) -> None:
        environment.install("deepspeed", "no-such-package-at-all")

    monkeypatch.setitem(SIDECARS, "deepspeed", replace(SIDECARS["deepspeed"], install=fill))
    # Its own pip is the slow part of an environment.
    monkeypatch.setattr(NewEnvironment, "create", lambda self: subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)], check=True))
    monkeypatch.setattr(NewEnvironment, "python", Path(sys.executable))
    with pytest.raises(UserError) as raised:
        install("deepspeed")
    assert "\n" not in str(raised.value) and "no-such-package-at-all" in str(raised.value) and "install.log" in str(raised.value)
    with pytest.raises(UserError, match="its installation did not end"):
        installed("deepspeed")


@pytest.mark.full
def test_a_killed_installation_begins_anew_and_a_running_one_is_waited_for_by_nobody(sidecars: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from tandem.backends import environment as e\n"
        "from tandem.backends.new_environment import NewEnvironment\n"
        "def hang(self):\n    self.folder.mkdir(parents=True); print('now', flush=True); time.sleep(600)\n"
        "NewEnvironment.create = hang\ne.install('deepspeed')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"now\n"
        with pytest.raises(UserError, match="is being made by another process"):
            install("deepspeed")
        other.send_signal(signal.SIGKILL)
    with pytest.raises(UserError, match="its installation did not end"):
        python_of("deepspeed")
    assert install("deepspeed").versions == {"deepspeed": "9.8.7"}
