"""One ``tandem serve`` that the gateway has started: its process, its log and its address."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.gateway.backend import Backend
from tandem.gateway.servers.places import Place
from tandem.gateway.servers.versions import ModelVersion
from tandem.runtime.process.processes import Threads, kill_group, spawn

_ADDRESS = re.compile(r"; (http://\S+) answers probes meanwhile")
_MOST_TAIL = 4096
"""Bytes of the end of a log that are looked at."""
_LAST_WORDS = 400
GRACE_S = 10.0
"""Time for a server without requests to end after SIGTERM."""


@dataclass(eq=False)
class Server:
    """A running ``tandem serve``. ``backend``: what the gateway knows of it, ``None`` until it has an address. ``is_leaving``: it gets no new request, and ends
    when it has none."""

    name: str
    version: ModelVersion
    place: Place
    log: Path
    api_key: str
    control_key: str
    process: "subprocess.Popen[bytes]"
    backend: Backend | None = None
    is_leaving: bool = False
    was_ready: bool = False
    is_candidate: bool = False
    """It starts with another version than the group has, and gets no request before it has answered one."""
    why: str = ""
    """Why the gateway has ended it, if it has."""
    began_s: float = field(default_factory=time.monotonic)
    kill_s: float | None = None
    """When it is killed if it has not ended, after SIGTERM."""
    _log_begin: int = 0

    @classmethod
    def start(
        cls, name: str, version: ModelVersion, flags: Mapping[str, Any], served_name: str, place: Place, folder: Path, logs: Path, host: str = "127.0.0.1"
    ) -> "Server":
        """Starts one that serves ``version`` with ``flags`` under ``served_name`` on a free port of ``host``. It ends with this process, whatever ends that;
        Ctrl-C of the terminal reaches the gateway alone, which ends it last. ``folder``: for its keys and flags, which only this user can read."""
        file_name = name.replace("/", "_")
        settings, log = folder / f"{file_name}.json", logs / f"{file_name}.log"
        # A flag of the gateway's file wins over the place's.
        settings.write_text(json.dumps({"threads": place.threads, **flags}), encoding="utf-8")
        keys = {option: secrets.token_urlsafe(32) for option in ("api-key", "control-key")}
        given = [word for option, key in keys.items() for word in (f"--{option}", f"@{write_key(folder / f'{file_name}.{option}', key)}")]
        quiet = ["--disable-uvicorn-access-log", "--disable-log-stats"]
        placed = ["--host", host, "--port", "0", "--served-model-name", served_name, "--weight-version", version.weights_text]
        arguments = ["serve", version.path, "--config", str(settings), *placed, *given, *quiet]
        begin = log.stat().st_size if log.exists() else 0
        process = spawn("tandem", arguments, threads=Threads(place.threads), output=log, new_session=True, environment=place.environment)
        if place.cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # It has ended, which is found out soon.
                os.sched_setaffinity(process.pid, place.cores)
        return cls(name, version, place, log, keys["api-key"], keys["control-key"], process, _log_begin=begin)

    @property
    def address(self) -> str | None:
        """Its address, ``None`` until it has written it."""
        found = _ADDRESS.search(self._read(self._log_begin))
        return found.group(1) if found else None

    @property
    def last_words(self) -> str:
        """The last line of its log; empty if it has written nothing."""
        begin = max(self._log_begin, (self.log.stat().st_size if self.log.exists() else 0) - _MOST_TAIL)
        lines = [line.strip() for line in self._read(begin).splitlines() if line.strip()]
        return lines[-1].removeprefix("tandem: ")[:_LAST_WORDS] if lines else ""

    def end(self) -> None:
        """Asks the process to end; calling it again changes nothing."""
        if self.kill_s is None:
            self.kill_s = time.monotonic() + GRACE_S
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process and what it has started."""
        kill_group(self.process)

    def _read(self, begin: int) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(begin)
            return file.read(2**20).decode("utf-8", errors="replace")
        return ""


def write_key(path: Path, key: str) -> Path:
    """Writes a key to a file that only this user can read; returns the file."""
    path.touch(mode=0o600)
    path.write_text(key, encoding="ascii")
    return path
