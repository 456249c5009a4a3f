"""Places engines of a serving pool on Ray: ``python -m tandem.cluster.launch.ray.engines ENGINES FOLDER GATEWAY_FILE...``.

ENGINES is a YAML file with a ``bundle`` of resources and ``engines``, each with a name, a port and a command. Each is the process of an actor in a placement
group of its own, which Ray starts again, on another node if need be. The settings of the gateways are written to FOLDER with the engines' addresses, and again
when one has another; gateways follow their file. SIGTERM ends the engines when they have finished what they have.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from tandem.cluster.launch.ray.actors import end_with_node
from tandem.cluster.launch.ray.placement import NAMESPACE, group_name, in_group, make_group, remove_groups
from tandem.config.yaml_text import read_mapping
from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.processes import Threads, spawn
from tandem.types import RunError, UserError

_LOOK_S = 1.0
_ENDS_S = 660.0
"""In which an engine that is asked to end finishes what it has."""
_MOST_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Engine:
    """``command``: its words; the first is ``tandem``, or a program on the PATH of the nodes."""

    name: str
    port: int
    command: tuple[str, ...]


class EngineActor:
    """Owns the process of an engine, in ``folder``. The kernel ends the process with the actor."""

    def __init__(self, folder: str, name: str, command: Sequence[str]) -> None:
        os.chdir(folder)
        self._name, self._command = name, list(command)
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        end_with_node()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def host(self) -> str:
        """Returns the address of this actor's node."""
        return str(ray.util.get_node_ip_address())

    def stop(self) -> None:
        """Lets the engine finish what it has; returns when it has ended."""
        with self._lock:
            self._stopped.set()
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
        self._thread.join()

    def _work(self) -> None:
        program, *arguments = self._command
        output, backoff = Path("logs") / f"{self._name}.out", Backoff()
        output.parent.mkdir(exist_ok=True)
        while not self._stopped.is_set():
            with self._lock:
                if self._stopped.is_set():
                    return
                cores = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
                # Tandem itself is that of this Python, whatever is on the PATH of a Ray worker.
                module, other = ("tandem.cli.main", None) if program == "tandem" else (None, program)
                self._process = spawn(module, arguments, program=other, threads=Threads(cores), new_session=True, output=output)
            if self._process.wait() == UserError.exit_code:
                # It was refused, and would be so again; its output says why.
                return
            self._stopped.wait(backoff.wait_s(int(time.monotonic() // 60)))


def read_engines(path: Path) -> tuple[dict[str, float], list[Engine]]:
    """Returns what each engine asks for, and the engines. Raises ``UserError``."""
    content = read_mapping(
        str(path), f"'{path}'", _MOST_BYTES, why_short="the engines of a pool are a short YAML file", missing="name a file of 'tandem emit'",
        wrong="has no engines; write it with 'tandem emit --topology inference --on ray'",
    )  # fmt: skip
    try:
        bundle = {str(name): float(amount) for name, amount in content["bundle"].items()}
        engines = [Engine(str(each["name"]), int(each["port"]), tuple(map(str, each["command"]))) for each in content["engines"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"'{path}' is not a file of engines; write it with 'tandem emit --topology inference --on ray'") from None
    return bundle, engines


def write_placed(files: Sequence[Path], folder: Path, engines: Sequence[Engine], hosts: Mapping[str, str]) -> None:
    """Writes the settings of the gateways with the address of every engine that has one, by atomic renames."""
    folder.mkdir(exist_ok=True)
    # The first gateway's last: who waits for it finds all.
    for file in sorted(files, reverse=True):
        text = file.read_text(encoding="utf-8")
        for engine in engines:
            if engine.name in hosts:
                text = text.replace(f"//{engine.name}.invalid:", f"//{hosts[engine.name]}:")
        fresh = folder / f"{file.name}.tmp"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / file.name)


def main(arguments: Sequence[str]) -> int:
    bundle, engines = read_engines(Path(arguments[0]))
    folder, files = Path(arguments[1]), [Path(each) for each in arguments[2:]]
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise UserError("RAY_ADDRESS is not set; give the address of the cluster's head, as RAY_ADDRESS=HOST:6379")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"Ray at '{address}' does not let this machine in: {' '.join(str(error).split())[:300]}") from None
    # Ray takes the signals over.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    job = f"engines-{os.getpid()}"
    try:
        actors = _placed(job, bundle, engines)
        known: dict[str, str] = {}
        asked: dict[Any, str] = {}
        while not stopped.is_set():
            found = {**known, **_hosts(actors, asked)}
            if found != known:
                known = found
                write_placed(files, folder, engines, known)
                print(f"{len(known)} of {len(engines)} engines have a node: {', '.join(sorted(set(known.values())))}", flush=True)
            stopped.wait(_LOOK_S)
        ending = [actors[name].stop.remote() for name in known]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_ENDS_S)
    finally:
        remove_groups(job)
        ray.shutdown()
    return 0


def _placed(job: str, bundle: Mapping[str, float], engines: Sequence[Engine]) -> dict[str, Any]:
    found = {}
    for engine in engines:
        options = in_group(make_group(job, engine.name, bundle, detached=False), bundle)
        actor = ray.remote(EngineActor).options(name=group_name(job, engine.name), **options)
        found[engine.name] = actor.remote(str(Path.cwd()), engine.name, list(engine.command))
    return found


def _hosts(actors: Mapping[str, Any], asked: dict[Any, str]) -> dict[str, str]:
    """Returns the addresses of the engines that have a node now; of one that waits for room, or is on its way to another, none. ``asked``: the calls that are
    not answered yet, one of each engine, which the next call has again."""
    waiting = set(asked.values())
    asked |= {actor.host.remote(): name for name, actor in actors.items() if name not in waiting}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S)
    found = {}
    for answer in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            found[asked[answer]] = str(ray.get(answer))
        del asked[answer]
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, RunError) as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
