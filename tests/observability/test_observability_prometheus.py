"""A real Prometheus finds a process in the targets folder, and ends with the command."""

import os
import signal
from pathlib import Path

import pytest
from http_processes import until
from prometheus_process import need_programs, observability

from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.runtime.exposition.http_server import MetricsServer
from tandem.runtime.exposition.targets import announced
from tandem.runtime.exposition.text import CONTENT_TYPE
from tandem.runtime.rpc.listener import listen


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_prometheus_has_what_a_run_says_and_ends_with_the_command(tmp_path: Path, number: int) -> None:
    need_programs()
    metrics = RunMetrics("r", "grpo", True)
    metrics.started(str(tmp_path), 10, None)
    metrics.row({"step": 4, "timing_s/step": 1.0, "mismatch_kl": 0.5})
    server = MetricsServer(listen("127.0.0.1", 0), metrics.text, CONTENT_TYPE)
    try:
        with observability(tmp_path, tmp_path / "targets") as running, announced(tmp_path / "targets", "r", server.address, {"job": "grpo", "run": "r"}):
            until(lambda: running.query("tandem_step"), "the run in Prometheus")
            (found,) = running.query("tandem_step")
            labels = {name: value for name, value in found["metric"].items() if name != "instance"}
            assert (labels, found["value"][1]) == ({"__name__": "tandem_step", "job": "grpo", "run": "r"}, "4"), "no label is doubled"
            assert running.query("up")[0]["metric"]["run"] == "r"
            until(lambda: "TandemMismatch" in running.firing(), "the alert")
            assert running.pids and running.stop(number) == (0 if number == signal.SIGINT else -number)
            until(lambda: not any(map(is_running, running.pids)), "the end of what it started")
    finally:
        server.close()
