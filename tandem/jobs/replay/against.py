"""Replays one step with two versions of the code and says which tensor differs first."""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tandem
from tandem.jobs.replay.comparison import Part
from tandem.jobs.replay.replay_step import replay
from tandem.runtime.process.temporary import temporary_folder
from tandem.runtime.records.tensor_digests import COMPLETE, Compared, compare_digests
from tandem.types import RunError, UserError

WHERE = "import tandem; print(tandem.__version__, tandem.__file__)"
RECORDS = "--record"


@dataclass(frozen=True, slots=True)
class Environment:
    """Another ``python`` with its own Tandem, of ``version`` and in ``place``."""

    python: Path
    version: str
    place: str


def other_environment(path: str | Path) -> Environment:
    """Returns the environment at ``path``: a program ``python``, or the folder of a virtual environment. Raises ``UserError``."""
    given = Path(path)
    python = given / "bin" / "python" if given.is_dir() else given
    if not python.is_file() or not os.access(python, os.X_OK):
        raise UserError(f"--against is '{path}', which is neither a program 'python' nor the folder of a virtual environment")
    found = subprocess.run([python, "-c", WHERE], env=_environment(), capture_output=True, text=True, check=False)
    if found.returncode != 0:
        why = found.stderr.strip().splitlines()[-1:] or ["it does not start"]
        raise UserError(f"--against is '{path}', whose Python has no Tandem ({why[0]}); install one there")
    version, place = found.stdout.strip().split(maxsplit=1)
    return Environment(python, version, str(Path(place).parent))


def replay_against(
    run_directory: str | Path, step: int, parts: Sequence[Part], environment: str | Path, *, inline: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Compared:
    """Replays ``parts`` of ``step`` of the run in ``run_directory`` here and in ``environment``, and compares their tensors. Raises ``UserError`` for an
    environment that cannot do it, and ``RunError`` where the replay fails there."""
    other = other_environment(environment)
    say(f"here: Tandem {tandem.__version__} in '{Path(tandem.__file__).parent}'; there: Tandem {other.version} in '{other.place}'")
    with temporary_folder() as folder:
        replay(run_directory, step, parts, inline=inline, say=say, record=folder / "here")
        say("the same in the other environment")
        _replay_there(other, Path(run_directory).resolve(), step, parts, folder / "there", inline)
        compared = compare_digests(folder / "here", folder / "there")
    if not compared.count:
        raise RunError(f"the two versions have no tensor in common; the Tandem in '{other.place}' is too different from this one to be compared")
    return compared


def _replay_there(other: Environment, run_directory: Path, step: int, parts: Sequence[Part], folder: Path, inline: bool) -> None:
    only = [word for part in parts for word in ("--only", part)]
    command = [
        str(other.python), "-m", "tandem", "replay", str(run_directory), "--step", str(step), *only, *(["--inline"] if inline else []), RECORDS, str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    # It compares with the record too, and ends with 1 where that differs.
    if not (folder / COMPLETE).exists():
        if RECORDS in done.stderr:
            raise UserError(f"the Tandem in '{other.place}' has no 'replay {RECORDS}'; it must be a version that has it")
        why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RunError(f"the replay in '{other.place}' failed: {why[0]}")


def _environment() -> dict[str, str]:
    """Returns the environment of a Python that must find its own Tandem, and none of this process or of the current folder."""
    mine = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {**{name: value for name, value in os.environ.items() if name not in mine}, "PYTHONSAFEPATH": "1"}
