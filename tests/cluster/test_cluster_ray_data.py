"""A run on data over nodes of a real Ray that is started for it: its bits, and a pod that is killed."""

import os
import signal
from pathlib import Path

from launched_runs import LaunchedRuns, left_behind
from ray_runs import marks, runs
from runs_on_data import MESH, WATCHED, assert_equal_to_local, assert_watched, ends, write_recipe

pytestmark = marks
__all__ = ["runs"]


def test_a_run_on_data_over_two_nodes_of_ray_has_the_bits_of_one_also_when_a_pod_is_killed(runs: LaunchedRuns) -> None:
    recipe = write_recipe(runs, 100)
    runs.tandem("train", recipe, "--on", "ray", "--run.name=two", "--ray.nodes=2", "--checkpoint.every_steps=5", *MESH, *WATCHED)
    runs.wait_for_step("two", 7)
    os.kill(pod_of(runs), signal.SIGKILL)
    ends(runs, "two")
    assert_watched(runs, "two", "ray-1")
    assert_equal_to_local(runs, "two", recipe)
    assert "pod ray-1 trains with rank 1" in (runs.directory("two") / "logs" / "pods" / "ray-1" / "pod.log").read_text()
    assert "restart 1 of 20" in runs.output("two") and left_behind(runs.folder) == []


def pod_of(runs: LaunchedRuns) -> int:
    """Returns the process that is the present life of the pod."""
    [shim] = [
        int(entry.name) for entry in Path("/proc").glob("[0-9]*")
        if (line := command_line(entry)) and b"tandem.pod.joining_shim" in line and str(runs.folder).encode() in line
    ]  # fmt: skip
    return shim


def command_line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
