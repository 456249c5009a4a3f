"""``make cluster-demo`` from start to end: a node of its Ray is killed, the dashboard shows the fault and the recovery in a real browser, and nothing of a demo
is left however it ends, also with another one beside it."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import browser, tab
from etcd_server import WHY_SKIPPED, program
from launched_runs import REWARDS, left_behind
from pod_runs import RECIPE

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed, so the demo of a cluster is NOT tested"),
    pytest.mark.skipif(program() is None, reason=WHY_SKIPPED),
]
DEMO = Path(__file__).parents[2] / "examples" / "cluster_demo.py"
SETTINGS = ("--evaluation.target_accuracy=1.0", "--evaluation.every_steps=1000", "--pods.min_count=3", "--pods.heartbeat_timeout_s=5")
LIMIT_S = 300.0


class Demo:
    """The demo in ``folder``, whose output is in ``log``."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        command = [sys.executable, str(DEMO), f"--runs={folder / 'runs'}", f"--recipe={RECIPE}", *arguments]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def said(self, pattern: str) -> "re.Match[str]":
        """Waits until the output has ``pattern``."""
        ends = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, text := self.log.read_text())) is None:
            assert time.monotonic() < ends and self.process.poll() is None, text
            time.sleep(0.1)
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []
    (tmp_path / REWARDS.name).write_bytes(REWARDS.read_bytes())

    def begin(*arguments: str) -> Demo:
        demos.append(Demo(tmp_path, f"demo-{len(demos)}", *arguments))
        return demos[-1]

    yield begin
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.send_signal(signal.SIGINT)
            demo.process.wait(120)


@pytest.mark.parametrize("kill", ["pod", "controller"])
def test_the_dashboard_shows_the_node_that_is_killed_and_that_the_run_has_recovered(start: Callable[..., Demo], kill: str, tmp_path: Path) -> None:
    demo = start("--kill", kill, "--after=6", "--", "--run.max_steps=300", *SETTINGS)
    url = demo.said(r"dashboard at (http://[\d.:]+)/").group(1)
    run = demo.said(r"run \S*(cluster-demo-\d+)\n").group(1)
    killed = demo.said(rf"after step \d+: kills (node-\d) \(process \d+\), the node of the {kill}")
    assert killed
    demo.said("the dashboard stays until Ctrl-C")
    with browser() as chromium, tab(chromium) as page:
        page.open(f"{url}/#/run/{run}/events")
        page.page.wait_for_selector("table tbody tr")
        rows = page.texts("table tbody tr")
        assert page.problems == []
    # The newest are the first.
    events = [row.split("\t")[1].strip() for row in reversed(rows)]
    if kill == "pod":
        assert "recovery" in events and any("ray-" in row and "recovery" in row for row in rows), rows
        assert "membership" in events[events.index("recovery") :], rows
    else:
        # The first one is that of a run that begins.
        assert events.count("resume") == 2 and "membership" in events[len(events) - events[::-1].index("resume") :], rows
    assert f"{run}: finished" in demo.log.read_text()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(120) == 130 and "Traceback" not in demo.log.read_text()
    assert left_behind(tmp_path) == []


def test_two_at_the_same_time_leave_nothing_one_after_ctrl_c_and_one_that_is_killed(start: Callable[..., Demo], tmp_path: Path) -> None:
    long = ("--kill=none", "--", "--run.max_steps=100000", *SETTINGS)
    first, second = start(*long), start(*long)
    for demo in (first, second):
        demo.said(r"step 3: reward ")
    first.process.send_signal(signal.SIGINT)
    second.process.kill()
    assert first.process.wait(120) == 130 and second.process.wait(120) == -signal.SIGKILL
    assert left_behind(tmp_path) == []
    assert "Traceback" not in first.log.read_text() + second.log.read_text()


def test_ctrl_c_while_ray_starts_leaves_neither_a_process_nor_a_run(start: Callable[..., Demo], tmp_path: Path) -> None:
    demo = start("--", *SETTINGS)
    demo.said("starts a Ray of 3 nodes")
    ends = time.monotonic() + LIMIT_S
    while not list(tmp_path.glob("runs/*/launch/ray.address")):
        assert time.monotonic() < ends and demo.process.poll() is None, demo.log.read_text()
        time.sleep(0.02)
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(120) == 130, demo.log.read_text()
    assert left_behind(tmp_path) == [] and not list(tmp_path.glob("runs/*"))
    assert "Traceback" not in demo.log.read_text()
