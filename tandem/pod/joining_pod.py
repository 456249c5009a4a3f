"""A pod that joins a run from another machine: starts its sidecar, and the next life of it whenever one ends. Imports no torch."""

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from tandem.config.coordination import CoordinationConfig
from tandem.config.health import HealthConfig
from tandem.config.pods import PodsConfig
from tandem.pod.joined_keeper import LaunchedKeeper, PodKeeper
from tandem.pod.joining_shim import AGAIN, REPORT_FILE, STACKS_FOLDER
from tandem.pod.weights_between_pods import tls_arguments
from tandem.runtime.coordination.open import store_address
from tandem.runtime.health.node_report import NodeReport
from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.processes import Threads, describe_exit, kill, spawn
from tandem.runtime.process.stacks import remove_ended, stacks_in
from tandem.runtime.rpc.credentials import read_credential
from tandem.runtime.rpc.pod_tls import tls_of
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcess
from tandem.types import UserError

logger = logging.getLogger(__name__)


def serve_run(
    run: str, coordination: CoordinationConfig, pods: PodsConfig, *, name: str, folder: Path, threads: int, faults: str = "",
    health: HealthConfig | None = None, report: NodeReport | None = None, trains: bool = True, keeper: Path | None = None,
    kept_in: str = "",
) -> int:  # fmt: skip
    """Joins the run ``run`` as the member ``name``, whose files and logs are in ``folder``, and draws its samples with ``threads`` until it ends or this
    process receives SIGTERM or SIGINT. ``health``: what is watched of this machine; ``report``: what the preflight has measured of it, for the run to judge
    (``None``: it was not, or is judged elsewhere). ``trains``: it may have ranks of the trainer. ``keeper``: the file of the keeper that the launcher has
    started here (``None``: the pod has its own, whose files are in the folder ``kept_in``, if it is given). Returns the exit status. Raises ``UserError`` for
    what is wrong before it has joined."""
    read_credential(Path(pods.credential_file))
    tls_of(pods)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    arguments = {
        "run": folder, "of-run": run, "member": name, "agent": f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        "join": store_address(coordination, Path(run)), "host": pods.host, "credential": Path(pods.credential_file).absolute(), "port": pods.port,
        "threads": threads, "lease": coordination.lease_s, "join-timeout": pods.join_timeout_s, "faults": faults, "trains": int(trains),
        "health": json.dumps(asdict(health or HealthConfig())),
    }  # fmt: skip
    if report is not None:
        (folder / REPORT_FILE).write_text(report.to_json(), encoding="utf-8")
    else:
        (folder / REPORT_FILE).unlink(missing_ok=True)
    # Of an earlier command.
    remove_ended(folder / STACKS_FOLDER)
    with stacks_in(folder / STACKS_FOLDER):
        tls = tls_arguments(pods)
        own = KeeperProcess(name, folder, read_credential(Path(pods.credential_file)), host=pods.host, tls=tls[1:], kept_in=kept_in, run=run)
        with contextlib.closing(PodKeeper(own if keeper is None else LaunchedKeeper(keeper))) as kept:
            return _Lives([text for key, value in arguments.items() for text in (f"--{key}", str(value))] + tls, kept).run()


class _Lives:
    def __init__(self, arguments: list[str], keeper: PodKeeper) -> None:
        self._arguments, self._keeper = arguments, keeper
        self._shim: subprocess.Popen[bytes] | None = None
        self._stops = 0

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        backoff, has_joined = Backoff(), False
        while not self._stops:
            began = time.monotonic()
            again = ["--again"] if has_joined else []
            with self._keeper.for_life() as descriptor:
                # The next life publishes what the one before has kept, so that a controller that begins finds it.
                keeps = ["--keeper", str(descriptor), "--keeps", str(int(self._keeper.is_asked_for))]
                self._shim = spawn(
                    "tandem.pod.joining_shim", [*self._arguments, *again, *keeps], threads=Threads(1), new_session=True, pass_fds=[descriptor]
                )  # fmt: skip
            status = self._wait(self._shim)
            if self._stops or status == 0:
                if not self._stops:
                    # The run has ended. A pod that is told to end may be one of a job that is to go on here.
                    self._keeper.forget()
                return max(0, status)
            has_joined |= status == AGAIN or status < 0
            if not has_joined or status == UserError.exit_code:
                return status
            # A life that lasted is progress.
            wait_s = backoff.wait_s(int(began // 60))
            print(f"the pod's sidecar ended ({describe_exit(status)}); it joins again in {wait_s:g} s", flush=True)
            self._sleep(wait_s)
        return 0

    def _wait(self, shim: "subprocess.Popen[bytes]") -> int:
        while (status := shim.poll()) is None:
            if self._stops > 1:
                return kill(shim)
            time.sleep(0.05)
        return status

    def _sleep(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not self._stops and time.monotonic() < ends:
            time.sleep(0.05)

    def _stop(self) -> None:
        self._stops += 1
        if self._shim is not None and self._shim.poll() is None:
            self._shim.terminate()
