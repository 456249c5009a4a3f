"""Runs on a Ray that is started for each of them on this machine."""

import importlib.util
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program
from launched_runs import LaunchedRuns
from pod_runs import PodRun

marks = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed, so runs on Ray are NOT tested"),
    pytest.mark.skipif(program() is None, reason=WHY_SKIPPED),
]
LONG = ("--run.max_steps=60", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=60", "--checkpoint.every_steps=5")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[LaunchedRuns]:
    runs = LaunchedRuns(tmp_path)
    yield runs
    for path in tmp_path.glob("runs/*/launch/record.json"):
        runs.begin("cancel", path.parents[1], "--now").communicate(timeout=300)


def ran(runs: LaunchedRuns, name: str) -> PodRun:
    return PodRun(runs.folder / "runs", name=name)


def ended(runs: LaunchedRuns, name: str) -> None:
    assert runs.wait_for_state(name, "finished", "failed", "stopped")["state"] == "finished", runs.output(name)


def placed(runs: LaunchedRuns, name: str) -> dict[str, str]:
    """Returns the node of each role of a run of three nodes. To ask takes longer than some of its steps."""
    until = time.monotonic() + 120
    while len(roles := dict(re.findall(r"([\w-]+) on (node-\d)", runs.status(name)["where"]))) < 3:
        assert time.monotonic() < until, roles
    return roles
