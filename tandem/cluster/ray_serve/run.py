"""Runs the applications of a file of Ray Serve until it is ended: ``python -m tandem.cluster.ray_serve.run FILE``, on the Ray cluster at ``RAY_ADDRESS``.

It checks the file first, says how many replicas run, and with SIGTERM or Ctrl-C deletes the applications, whose replicas finish what they have. ``serve run``
leaves them after SIGTERM, and ``serve shutdown`` needs Ray's dashboard.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from tandem.cluster.launch.ray.commands import check_answers
from tandem.cluster.launch.ray.environment import ray_environment
from tandem.cluster.ray_serve.section import read_file
from tandem.types import RunError, UserError

_LOOK_S = 1.0
_SUBMIT_S = 300.0
_ENDS_S = 660.0
"""In which a replica that is asked to end finishes what it has."""
_COMMAND = "import sys; from ray.serve.scripts import cli; cli(sys.argv[1:])"


def main(arguments: Sequence[str]) -> int:
    path, address = Path(arguments[0]), os.environ.get("RAY_ADDRESS", "")
    names = read_file(path)
    if not re.fullmatch(r".+:\d{1,5}", address, re.ASCII) or int(address.rpartition(":")[2]) > 65535:
        raise UserError(f"RAY_ADDRESS is '{address}'; give the address of the cluster's head, as RAY_ADDRESS=HOST:6379")
    check_answers(address, "start it ('ray start --head'), or give the address of another as RAY_ADDRESS")
    stopped = threading.Event()
    _listen(stopped)
    _submit(path, address)
    ray.init(address=address, namespace="serve", log_to_driver=False)
    # Ray takes the signals over.
    _listen(stopped)
    try:
        _watch(names, stopped)
    finally:
        _end(names)
    return 0


def _listen(stopped: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())


def _submit(path: Path, address: str) -> None:
    """Gives the file to Ray Serve, which goes on by itself. Raises ``UserError`` if it refuses."""
    command = [sys.executable, "-c", _COMMAND, "run", str(path), "--address", address, "--non-blocking"]
    try:
        # A signal to this process's group is this process's alone: what it would interrupt halfway is deleted afterwards.
        done = subprocess.run(
            command, env={**os.environ, **ray_environment(None)}, capture_output=True, text=True, errors="replace", timeout=_SUBMIT_S, check=False,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(f"Ray at '{address}' did not take '{path}' within {_SUBMIT_S:.0f} s; see 'ray status', and try again") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "Error" in line] or [f"exit status {done.returncode}"]
        raise UserError(f"Ray at '{address}' does not take '{path}': {lines[-1][:300]}")


def _watch(names: Sequence[str], stopped: threading.Event) -> None:
    """Says what runs whenever that changes, until ``stopped``. Raises ``RunError`` for an application that cannot be started."""
    said: dict[str, str] = {}
    while not stopped.wait(_LOOK_S):
        try:
            there: Mapping[str, Any] = serve.status().applications
        except (ray.exceptions.RayError, RayServeException) as error:
            raise RunError(f"Ray Serve does not answer any more: {str(error).splitlines()[0]}") from None
        for name in names:
            if (application := there.get(name)) is None:
                continue
            if application.status == "DEPLOY_FAILED":
                lines = [line.strip() for line in application.message.splitlines() if line.strip()] or ["it does not say why"]
                why = next((line for line in reversed(lines) if "Error" in line), lines[-1])
                raise RunError(f"application '{name}' could not be started: {why[:400]}")
            replicas = sum(count for each in application.deployments.values() for state, count in each.replica_states.items() if state == "RUNNING")
            if (text := f"application '{name}' is {application.status.lower()}, {replicas} replicas run") != said.get(name):
                said[name] = text
                print(text, flush=True)


def _end(names: Sequence[str]) -> None:
    """Deletes the applications, and ends Serve when their replicas have finished what they have."""
    ends = time.monotonic() + _ENDS_S
    try:
        for name in names:
            serve.delete(name, _blocking=False)
        while any(name in names for name in serve.status().applications) and time.monotonic() < ends:
            time.sleep(_LOOK_S)
        serve.shutdown()
    except (ray.exceptions.RayError, RayServeException) as error:
        print(f"tandem: Ray Serve could not be ended ({str(error).splitlines()[0]})", file=sys.stderr, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, RunError) as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
