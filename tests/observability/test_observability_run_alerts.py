"""Alerts of a run that trains, in a real Prometheus: each fires on a fault that is injected into the run, and clears when the fault is over."""

import os
import signal
from pathlib import Path

import pytest
from http_processes import until
from package_data import make_datasets
from prometheus_process import need_programs, observability
from watched_run import WatchedRun, throttled

LIMIT_S = 240


@pytest.mark.full
def test_alerts_fire_on_a_slow_rank_a_killed_rank_and_a_controller_that_stands_still_and_clear(tmp_path: Path) -> None:
    need_programs()
    data, targets = tmp_path / "data", tmp_path / "targets"
    data.mkdir()
    make_datasets(data, "json")
    with observability(tmp_path, targets) as prometheus:
        run = WatchedRun(tmp_path, data, health={"straggler_steps": 12}, metrics={"port": 0, "targets_folder": str(targets), "database": False})
        firing = lambda name: name in prometheus.firing()
        try:
            run.wait_for_step(24)
            until(lambda: prometheus.query('tandem_steps_total{job="pretrain"} > 3'), "the run in Prometheus", LIMIT_S)
            assert prometheus.firing() == set(), "a healthy run gives no alert"
            with throttled(run.rank_pid(1)):
                until(lambda: firing("TandemStraggler"), "the alert of the slow rank", LIMIT_S)
                (alert,) = [each for each in prometheus.api("alerts")["alerts"] if each["labels"]["alertname"] == "TandemStraggler"]
                assert alert["labels"]["rank"] == "1" and alert["annotations"]["summary"].startswith("rank 1 on ")
            until(lambda: not firing("TandemStraggler"), "its end", LIMIT_S)
            os.kill(run.process.pid, signal.SIGSTOP)
            try:
                until(lambda: firing("TandemTargetDown"), "the alert of the controller that stands still", LIMIT_S)
            finally:
                os.kill(run.process.pid, signal.SIGCONT)
            until(lambda: not firing("TandemTargetDown"), "its end", LIMIT_S)
            assert not firing("TandemRestarts"), "no rank was replaced so far"
            os.kill(run.rank_pid(0), signal.SIGKILL)
            until(lambda: firing("TandemRestarts"), "the alert of the killed rank", LIMIT_S)
            run.wait_for_step(run.rows + 3)
        finally:
            run.end()
        assert prometheus.stop() == 0
