"""A Python environment that is being made: pip inside it, with every line of output in a log."""

import importlib.metadata
import os
import re
import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.types.errors import UserError

_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class NewEnvironment:
    """An environment in ``folder``. ``pip_arguments`` are passed to every ``install`` and ``download``; ``say`` is told what is done now."""

    name: str
    folder: Path
    pip_arguments: Sequence[str] = ()
    say: Callable[[str], None] = lambda line: None

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """The folder of what is installed in it."""
        return next(self.folder.glob("lib/python3*/site-packages"))

    @property
    def log(self) -> Path:
        return self.folder / "install.log"

    def create(self) -> None:
        """Makes the environment, with pip alone."""
        self.say("an empty environment")
        venv.create(self.folder, with_pip=True)

    def install(
        self, *requirements: str, options: Sequence[str] = (), dependencies: bool = True, constraints: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Installs ``requirements``, with what they depend on unless told not to. ``options``: of pip. ``constraints``: versions of whatever is installed for
        them."""
        arguments = ["install", *options, *self.pip_arguments]
        if constraints:
            file = self.folder / "constraints.txt"
            file.write_text("".join(f"{line}\n" for line in constraints), encoding="utf-8")
            arguments += ["--constraint", str(file)]
        shown = ", ".join(requirements[:3]) + (f" and {len(requirements) - 3} more" if len(requirements) > 3 else "")
        self.run(shown, *_PIP, *arguments, *([] if dependencies else ["--no-deps"]), *requirements, environment=environment)

    def download(self, requirement: str) -> Path:
        """Downloads the wheel of ``requirement`` alone. Returns the file."""
        into = self.folder / "wheels"
        self.run(requirement, *_PIP, "download", *self.pip_arguments, "--no-deps", "--only-binary", ":all:", "--dest", str(into), requirement)
        return next(into.glob(re.sub(r"[-_.]+", "_", re.split(r"[=<>! \[]", requirement)[0]) + "-*.whl"))

    def run(self, what: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Runs the environment's interpreter. Raises ``UserError`` with the last line of its output if it fails; all of it is in the log."""
        self.say(what)
        with self.log.open("ab") as log:
            log.write(f"\n$ {self.python} {' '.join(arguments)}\n".encode())
            log.flush()
            done = subprocess.run(
                [str(self.python), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        if done.returncode != 0:
            lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR:")] or lines
            raise UserError(
                f"the environment of the {self.name} sidecar was not made: {what}: {errors[-1].removeprefix('ERROR: ')} (the rest is in {self.log}); mend "
                f"that and run 'tandem sidecar install {self.name}' again"
            )


def torch_requirement() -> str:
    """Returns the version of torch that Tandem runs with, for an environment that must have the same."""
    return f"torch=={importlib.metadata.version('torch').partition('+')[0]}"


def tandem_requirements() -> list[str]:
    """Returns what Tandem itself needs, but torch."""
    needed = importlib.metadata.requires("tandem-rl") or []
    return [line for line in needed if "extra ==" not in line and not re.match(r"torch\b", line)]
