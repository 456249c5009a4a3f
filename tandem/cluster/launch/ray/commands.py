"""What the launcher asks of Ray. Imports neither Ray nor anything of a run."""

import contextlib
import importlib.util
import json
import socket
import subprocess
from collections.abc import Mapping
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
        check_answers(self.address, "start it ('ray start --head'), or leave ray.address out")
        warnings, environment = UnnamedFile("tandem-ray"), ray_environment(self.token)
        with contextlib.closing(warnings):
            process = spawn(
                "tandem.cluster.launch.ray.driver", threads=Threads(1), stdin=subprocess.PIPE, capture=True, output=warnings.path, environment=environment
            )
            try:
                said, _ = process.communicate(json.dumps({"task": task, "address": self.address, **request}).encode(), timeout=_ANSWER_S)
            except subprocess.TimeoutExpired:
                raise RunError(f"Ray at '{self.address}' did not answer within {_ANSWER_S:.0f} s; see 'ray status', and try again") from None
            finally:
                kill(process)
            lines = [line.strip() for line in warnings.read_text().splitlines() if line.strip()] or ["it says nothing"]
        try:
            answer = dict(json.loads(said))
        except ValueError:
            raise RunError(f"Ray at '{self.address}' could not be asked: {lines[-1][:300]}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer


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
