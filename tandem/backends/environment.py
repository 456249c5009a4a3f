"""The environments of sidecars on this machine: each is made once, by ``tandem sidecar install NAME``, and serves every run.

``sidecar.json`` is written last, so an environment without it is not whole. Tandem itself is not installed in it: a process of the sidecar finds it in
``tandem_path``, so that an environment does not belong to one version of Tandem.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

import tandem
from tandem.backends.new_environment import NewEnvironment
from tandem.backends.sidecars import SIDECARS
from tandem.types.errors import UserError

FOLDER = "TANDEM_SIDECARS"
"""The variable that names another folder for environments than ``~/.cache/tandem/sidecars``."""
RECORD = "sidecar.json"
FORMAT = 1
"""Of ``sidecar.json``; it changes when an environment that was made before will not do."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What ``sidecar.json`` says: the ``versions`` of its distributions, the ``python`` that it was made with, and when."""

    format: int
    name: str
    versions: dict[str, str]
    python: str
    made_at: str


def folder_of(name: str) -> Path:
    """Returns the folder of an environment, made or not."""
    return Path(os.environ.get(FOLDER) or "~/.cache/tandem/sidecars").expanduser() / name


def installed(name: str) -> Installed | None:
    """Returns what is known of an environment; ``None`` if it was not made. Raises ``UserError`` for one that is not whole."""
    folder = folder_of(name)
    if not folder.exists():
        return None
    broken = f"the environment of the {name} sidecar, {folder}, is not whole"
    try:
        record = Installed(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{broken} (its installation did not end); make it with: tandem sidecar install {name}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{broken} ({RECORD}: {error}); make it again with: tandem sidecar install {name} --force") from None
    if record.format != FORMAT or record.name != name:
        raise UserError(f"{broken} ({RECORD} is of another version of Tandem); make it again with: tandem sidecar install {name} --force")
    if not os.access(folder / "bin" / "python", os.X_OK):
        raise UserError(f"{broken} (its interpreter bin/python is gone); make it again with: tandem sidecar install {name} --force")
    return record


def python_of(name: str) -> Path:
    """Returns the interpreter of the sidecar's environment. Raises ``UserError`` with the command that makes it if it is missing or not whole."""
    if installed(name) is None:
        sidecar = SIDECARS[name]
        raise UserError(f"'{sidecar.key}' is '{name}', and the {name} sidecar has no environment on this machine; make it with: tandem sidecar install {name}")
    return folder_of(name) / "bin" / "python"


def tandem_path(folder: Path) -> str:
    """Returns what ``PYTHONPATH`` is in a process of a sidecar: a folder in ``folder`` which has a link to this Tandem and nothing else, so that no other
    package of our environment hides one of its own."""
    place, package = folder / "python", Path(tandem.__file__).resolve().parent
    place.mkdir(parents=True, exist_ok=True)
    link = place / "tandem"
    if not (link.is_symlink() and link.readlink() == package):
        fresh = place / f".tandem-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(package)
        fresh.replace(link)
    return str(place)


def install(name: str, *, force: bool = False, pip_arguments: Sequence[str] = (), say: Callable[[str], None] = lambda line: None) -> Installed:
    """Makes the environment of sidecar ``name``, unless it is there; one that is not whole, or with ``force`` any, is made anew. Raises ``UserError`` if it
    cannot be made."""
    folder, sidecar = folder_of(name), SIDECARS[name]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{name}.lock"), timeout=0, fallback_to_soft=False).acquire()
    except Timeout:
        raise UserError(f"the environment of the {name} sidecar is being made by another process; wait for it") from None
    except OSError as error:
        raise UserError(f"the environment of the {name} sidecar cannot be made in {folder.parent}: {error.strerror}; name another folder in {FOLDER}") from None
    with lock:
        if not force:
            with contextlib.suppress(UserError):
                if (there := installed(name)) is not None:
                    return there
        say("removing what is there") if folder.exists() else None
        shutil.rmtree(folder, ignore_errors=True)
        environment = NewEnvironment(name, folder, tuple(pip_arguments), say)
        try:
            environment.create()
            sidecar.install(environment)
            environment.run(f"import {', '.join(sidecar.imports)}", "-c", f"import {', '.join(sidecar.imports)}")
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"the environment of the {name} sidecar was not made in {folder}: {error}") from None
        record = Installed(FORMAT, name, _versions(environment, sidecar.distributions), sys.version.split()[0], datetime.now(UTC).isoformat(timespec="seconds"))
        fresh = folder / f".{RECORD}"
        fresh.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        fresh.replace(folder / RECORD)
        return record


def _versions(environment: NewEnvironment, distributions: Sequence[str]) -> dict[str, str]:
    """Returns the versions of those of ``distributions`` that the environment has."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    found = json.loads(subprocess.run([str(environment.python), "-c", code], capture_output=True, check=True, text=True).stdout)
    return {each: found[each] for each in distributions if each in found}
