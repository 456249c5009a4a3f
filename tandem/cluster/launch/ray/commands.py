"""What the launcher asks of Ray. Imports neither Ray nor anything of a run."""

import contextlib
import importlib.util
import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.launch.ray.environment import ray_environment
from tandem.runtime.process.processes import Threads, kill, spawn
from tandem.runtime.process.temporary import UnnamedFile
from tandem.types import RunError, UserError

_ANSWER_S, _CONNECT_S = 180.0, 10.0


@dataclass(frozen=True, slots=True)
class RayAt:
    """A Ray cluster. ``token``: the file with its token; ``None``: as the environment says."""

    address: str
    token: Path | None = None

    def ask(self, task: str, **request: Any) -> Mapping[str, Any]:
        """Returns the answer of Ray to ``task`` (see ``tandem.cluster.launch.ray.driver``). Raises ``UserError`` if it is refused."""
        with self.connecting() as driver:
            return driver.ask(task, **request)

    @contextlib.contextmanager
    def connecting(self) -> "Iterator[Driver]":
        """Yields a process that connects to Ray meanwhile, and ends with the block. Raises ``UserError`` if nothing listens at the address."""
        check_answers(self.address, "start it ('ray start --head'), or leave ray.address out")
        with contextlib.closing(Driver(self)) as driver:
            yield driver


class Driver:
    """A process of ``tandem.cluster.launch.ray.driver``, which is asked once."""

    def __init__(self, at: RayAt) -> None:
        self._at, self._warnings = at, UnnamedFile("tandem-ray")
        self._process = spawn(
            "tandem.cluster.launch.ray.driver", [at.address], threads=Threads(1), stdin=subprocess.PIPE, capture=True, output=self._warnings.path,
            environment=ray_environment(at.token),
        )  # fmt: skip

    def ask(self, task: str, **request: Any) -> Mapping[str, Any]:
        """As ``RayAt.ask``."""
        try:
            said, _ = self._process.communicate(json.dumps({"task": task, **request}).encode(), timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"Ray at '{self._at.address}' did not answer within {_ANSWER_S:.0f} s; see 'ray status', and try again") from None
        lines = [line.strip() for line in self._warnings.read_text().splitlines() if line.strip()] or ["it says nothing"]
        try:
            answer = dict(json.loads(said))
        except ValueError:
            raise RunError(f"Ray at '{self._at.address}' could not be asked: {lines[-1][:300]}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        kill(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._warnings.close()


def check_answers(address: str, fix: str) -> None:
    """Raises ``UserError``, which ends with ``fix``, if nothing listens at ``address``, HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            pass
    except OSError as error:
        raise UserError(f"no Ray answers at '{address}' ({error.strerror or error}); {fix}") from None


def check_installed() -> None:
    """Raises ``UserError`` where Ray is not."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs the package 'ray', which is not installed here; install it with: pip install 'tandem-rl[ray]'")
