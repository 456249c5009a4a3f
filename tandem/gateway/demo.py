"""``tandem gateway --demo``: two servers of one model, a key, and the gateway with its page before them."""

import contextlib
import os
import signal
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.gateway.keys import new_key, write_keys
from tandem.gateway.server import run_gateway
from tandem.runtime.process.temporary import temporary_folder
from tandem.serving.http_process import say
from tandem.types import UserError

DEFAULT_MODEL = "runs/sort/model"
"""What ``make run`` writes."""
_COUNT = 2


def run_demo(given: str, host: str | None, port: int | None, *, opens_browser: bool) -> int:
    """Serves until SIGTERM or SIGINT, and leaves neither a process nor a file; returns the exit status. Raises ``UserError`` if the model is missing or
    cannot be served."""
    model = find_demo_model(given)
    name = model.parent.name if model.name == "model" else model.name
    with _interruptible(), temporary_folder() as folder:
        key, record = new_key("demo", role="admin")
        keys = folder / "keys.json"
        write_keys(keys, {record.id: record})
        placed = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
        servers = {name.replace(" ", "-"): {"model": str(model), "count": _COUNT}}
        config = build(GatewayConfig, {"servers": servers, "keys_file": str(keys), "probes": {"interval_s": 0.5}, **placed})

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
    """Lets a terminal that is closed end the demo as Ctrl-C does, so that no file is left."""
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_screen() -> bool:
    """Returns whether a browser has a place to open a window; one that works in the terminal would take it over."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
