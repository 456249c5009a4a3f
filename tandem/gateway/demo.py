"""``tandem gateway --demo``: two servers of one model, a key, and the gateway with its page before them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.gateway.keys import new_key, write_keys
from tandem.gateway.server import run_gateway
from tandem.runtime.process.processes import Threads, available_cores, describe_exit, spawn, terminate
from tandem.serving.http_process import say
from tandem.types import UserError

DEFAULT_MODEL = "runs/sort/model"
"""What ``make run`` writes."""
_INSTANCES = 2
_ADDRESS = re.compile(r" at (http://\S+) \(")
_POLL_S = 0.1
_GRACE_S = 10.0


def run_demo(given: str, host: str | None, port: int | None, *, opens_browser: bool) -> int:
    """Serves until SIGTERM or SIGINT, and leaves neither a process nor a file; returns the exit status. Raises ``UserError`` if the model is missing or
    cannot be served."""
    model = find_demo_model(given)
    name = model.parent.name if model.name == "model" else model.name
    with _interruptible(), tempfile.TemporaryDirectory(prefix="tandem-demo-") as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder) / f"instance-{number}.log" for number in range(_INSTANCES)]
        say(f"loading '{model}' in {_INSTANCES} servers")
        instances = [stack.enter_context(_instance(model, name, log)) for log in logs]
        backends = [{"url": _address(process, log), "name": f"instance-{number}"} for number, (process, log) in enumerate(zip(instances, logs, strict=True))]
        key, record = new_key("demo", role="admin")
        keys = Path(folder) / "keys.json"
        write_keys(keys, {record.id: record})
        placed = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
        config = build(GatewayConfig, {"backends": backends, "keys_file": str(keys), "probes": {"interval_s": 0.5}, **placed})

        def show(address: str) -> None:
            page = f"{address}/#key={key}"
            say(f"the key of this demo is {key}")
            say(f"open {page}")
            if opens_browser and _has_screen():
                webbrowser.open(page)

        return run_gateway(config, show)


def find_demo_model(given: str) -> Path:
    """Returns the folder of the model ``given``, which may be that of a run. Raises ``UserError`` if there is none."""
    for folder in (Path(given), Path(given) / "model"):
        if (folder / "config.json").is_file():
            return folder.resolve()
    made = "'make run' or 'tandem train sort' makes it; or name another one" if given == DEFAULT_MODEL else "name a model's or a run's folder"
    raise UserError(f"there is no model in '{given}'; {made}: tandem gateway --demo FOLDER")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGTERM, and a terminal that is closed, end the demo as Ctrl-C does, so that what was started is ended. While it serves, the gateway has a handler
    of its own for SIGTERM."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _instance(model: Path, name: str, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Runs ``tandem serve``. It ends with this process, whatever ends that; Ctrl-C of the terminal reaches the gateway alone, which ends it last."""
    threads = max(1, available_cores() // _INSTANCES)
    quiet = ["--disable-uvicorn-access-log", "--disable-log-stats"]
    arguments = ["serve", str(model), "--port", "0", "--served-model-name", name, "--threads", str(threads), *quiet]
    process = spawn("tandem", arguments, threads=Threads(threads), output=log, new_session=True)
    try:
        yield process
    finally:
        terminate(process, _GRACE_S)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Returns the address of an instance as soon as it serves. Raises ``UserError`` if it ends instead."""
    while True:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        serving = [line for line in text.splitlines() if line.startswith("tandem: serving ")]
        if serving and (found := _ADDRESS.search(serving[-1])):
            return found.group(1)
        if process.poll() is not None:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), describe_exit(process.returncode))
            raise UserError(f"the demo's server ended at its start: {last.removeprefix('tandem: ')[:400]}")
        time.sleep(_POLL_S)


def _has_screen() -> bool:
    """Returns whether a browser has a place to open a window; one that works in the terminal would take it over."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
