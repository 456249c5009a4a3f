"""Answers ``/metrics`` for a run while it runs, names it in the targets folder, and keeps its series in a database next to the journal."""

import contextlib
import importlib.util
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from tandem.config.metrics import MetricsConfig
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.jobs.helper_process import HelperProcess
from tandem.metrics_database.store import FILE
from tandem.runtime.callback import Callback
from tandem.runtime.exposition.http_server import MetricsServer
from tandem.runtime.exposition.targets import announced, check_folder
from tandem.runtime.process.processes import Threads, spawn, terminate, wait
from tandem.runtime.rpc.listener import listen
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.jobs.callbacks import Callbacks


_LAST_SCRAPE_S = 15.0


def check_metrics(config: MetricsConfig | None) -> None:
    """Raises ``UserError`` where the run could not answer ``/metrics``: a package, the port or the folder."""
    with metrics_listener(config):
        pass


@contextlib.contextmanager
def metrics_listener(config: MetricsConfig | None) -> Iterator[socket.socket | None]:
    """Yields the socket of ``config``, which is closed afterwards; ``None`` without the section. Raises as ``check_metrics``."""
    if config is None:
        yield None
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise UserError("section 'metrics' needs prometheus_client, which is not installed; pip install 'tandem-rl[metrics]', or remove the section")
    if config.targets_folder:
        check_folder(config.targets_folder)
    with listen(config.host, config.port) as listener:
        yield listener


@contextlib.contextmanager
def exposed(recipe: AnyRecipe, directory: Path, listener: socket.socket | None, callbacks: "Callbacks") -> Iterator[None]:
    """Answers ``/metrics`` of the run in ``directory`` on ``listener`` from the events that ``callbacks`` are told of, and says where."""
    config = recipe.metrics
    if config is None or listener is None:
        yield
        return
    from tandem.jobs.exposed.run_metrics import RunMetrics
    from tandem.runtime.exposition.text import CONTENT_TYPE

    run, job = directory.resolve().name, str(recipe.algorithm.name)
    metrics = RunMetrics(run, job, recipe.is_exact if isinstance(recipe, Recipe) else None)
    callbacks.add(metrics)
    with contextlib.ExitStack() as stack:
        server = MetricsServer(listener, metrics.text, CONTENT_TYPE)
        stack.callback(server.close)
        if config.targets_folder:
            labels = {"job": job, "run": run}
            stack.enter_context(announced(config.targets_folder, f"run-{directory.resolve()}", server.address, labels))
        if not ipaddress.ip_address(str(server.address[0]).partition("%")[0]).is_loopback:
            callbacks.tell("message", f"warning: anyone who reaches {server.address[0]} may read the metrics of this run; leave out metrics.host")
        host = f"[{server.address[0]}]" if ":" in str(server.address[0]) else server.address[0]
        callbacks.tell("message", f"metrics at http://{host}:{server.address[1]}/metrics")
        if config.database:
            stack.enter_context(_kept(config, directory, f"http://{host}:{server.address[1]}/metrics", {"job": job, "run": run}, callbacks))
        yield


@contextlib.contextmanager
def _kept(config: MetricsConfig, directory: Path, url: str, labels: Mapping[str, str], callbacks: "Callbacks") -> Iterator[None]:
    """Runs the process that scrapes ``url`` into the database of the run in ``directory``, again where it ends. The run does not wait for it."""
    options = [f"--interval={config.interval_s}", f"--retention-s={config.retention_days * 86400}", f"--most-bytes={round(config.database_mib * 2**20)}"]
    given = [str(directory / FILE), f"--url={url}", *(f"--label={name}={value}" for name, value in labels.items()), *options]
    logs = directory / "logs"
    logs.mkdir(exist_ok=True)

    def start() -> "Popen[bytes]":
        return spawn("tandem.metrics_database.collect", given, threads=Threads(1), new_session=True, stdin=PIPE, output=logs / "metrics_database.log")

    watch = _Watch(HelperProcess("the metrics database", start, lambda text: callbacks.tell("message", text)))
    callbacks.add(watch)
    try:
        yield
    finally:
        # One that was killed is started for the last time.
        watch.helper.look(now=True)
        process = watch.helper.process
        # It scrapes once more, the last step of the run, and ends.
        assert process.stdin is not None
        process.stdin.close()
        wait(process, _LAST_SCRAPE_S)
        terminate(process)


class _Watch(Callback):
    """Looks after each step whether the process still runs."""

    def __init__(self, helper: HelperProcess) -> None:
        self.helper = helper

    def row(self, row: Mapping[str, float | int | str]) -> None:
        self.helper.look()
