"""What is wrong on the nodes of a real Slurm is found by the job before the run begins, in one line, and leaves nothing there."""

import json
import os
import re
from pathlib import Path

import pytest
from launched_runs import TINY, LaunchedRuns, left_behind
from pod_runs import RECIPE
from slurm_cluster import SlurmCluster
from wall_clock import FOLDER, WallClock

from tandem import __version__
from tandem.runtime.rpc.listener import listen

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("patch", "line"),
    [
        ("import tandem; tandem.__version__ = '0.0.9'", rf"node n2 has Tandem 0\.0\.9 and n1 has {__version__}; install the same version on all nodes"),
        ("import time; now = time.time; time.time = lambda: now() + 60",
         r"the clock of node n2 is [56]\d\.\d s ahead of that of n1, more than cluster\.max_clock_offset_s"),
    ],
    ids=["version", "clock"],
)
def test_a_node_with_another_version_or_a_clock_apart_is_named_before_the_run_begins(slurm: LaunchedRuns, tmp_path: Path, patch: str, line: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import os\nif os.environ.get('SLURMD_NODENAME') == 'n2':\n    {patch}\n")
    runs = LaunchedRuns(tmp_path, {**slurm.environment, "PYTHONPATH": str(site)})
    runs.tandem("train", RECIPE, "--on", "slurm", "--run.name=apart", "--slurm.nodes=2", "--cluster.min_speed=0")
    status = runs.wait_for_state("apart", "finished", "failed", "stopped")
    assert status["state"] == "failed" and re.search(line, status["reason"]), (status, runs.output("apart"))
    assert not (runs.directory("apart") / "journal.sqlite").exists() and left_behind(tmp_path) == []


def test_a_clock_that_is_apart_when_the_job_is_queued_again_is_named_before_the_run_goes_on(
    slurm: LaunchedRuns, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    site, clock = tmp_path / "site", WallClock(tmp_path / "clock")
    site.mkdir()
    of_n2 = f"import os, runpy\nif os.environ.get('SLURMD_NODENAME') == 'n2':\n    runpy.run_path({str(FOLDER / 'sitecustomize.py')!r})\n"
    (site / "sitecustomize.py").write_text(of_n2)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    runs = LaunchedRuns(tmp_path, {**slurm.environment, **clock.environment, "PYTHONPATH": path})
    runs.tandem("train", RECIPE, "--on", "slurm", "--run.name=later", "--slurm.nodes=2", "--cluster.min_speed=0", "--run.max_steps=100000")
    runs.wait_for_step("later", 3)
    clock.set(60.0)
    slurm_cluster.ask("scontrol", "requeue", json.loads((runs.directory("later") / "launch" / "record.json").read_text())["job"])
    status = runs.wait_for_state("later", "finished", "failed", "stopped")
    line = r"the clock of node n2 is (59\.\d|60\.\d) s ahead of that of n1, more than cluster\.max_clock_offset_s"
    assert status["state"] == "failed" and re.search(line, status["reason"]), (status, runs.output("later"))
    assert left_behind(tmp_path) == []


def test_a_port_that_is_taken_on_the_node_is_named_before_the_run_begins(slurm: LaunchedRuns, tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        slurm.tandem("train", TINY, "--on", "slurm", "--run.name=taken", f"--metrics.port={port}")
        status = slurm.wait_for_state("taken", "finished", "failed", "stopped")
    assert status["state"] == "failed" and f"port {port} on 127.0.0.1 cannot be taken" in status["reason"], (status, slurm.output("taken"))
    assert not (slurm.directory("taken") / "metrics.jsonl").exists() and left_behind(tmp_path) == []
