"""Runs on a real Ray that is started for them, over several nodes of this machine: they have the bits of the local run, and nothing is left of them."""

import re
import time

from launched_runs import TINY, LaunchedRuns, left_behind
from pod_runs import RECIPE, difference
from ray_runs import ended, marks, ran, runs

pytestmark = marks
__all__ = ["runs"]


def test_a_run_over_three_nodes_has_the_bits_of_the_local_one_and_leaves_nothing(runs: LaunchedRuns) -> None:
    said = runs.tandem("train", RECIPE, "--on", "ray", "--run.name=three", "--ray.nodes=3", "--pods.min_count=3")
    assert re.match(r"submitted job three-[0-9a-f]{8}-1 to a Ray cluster on this machine: run runs/three\n", said)
    assert runs.refusal("resume", "runs/three").startswith(f"'{runs.directory('three')}' is ")
    runs.tandem("train", RECIPE, "--run.name=local")
    followed = runs.tandem("logs", "runs/three", "--follow")
    ended(runs, "three")
    assert followed == runs.tandem("logs", "runs/three") and "pod 2 (ray-2) joined the run" in followed
    assert difference(ran(runs, "three"), ran(runs, "local")) == []
    assert "pod ray-1 joined" in runs.tandem("logs", "runs/three", "--role", "pods/ray-1/rollout_shim")
    assert left_behind(runs.folder) == []
    assert "has finished" in runs.tandem("resume", "runs/three")


def test_trainer_ranks_on_three_nodes_have_the_bits_of_three_ranks_on_one(runs: LaunchedRuns) -> None:
    mesh = ("--parallel.data=3", "--rollout.prompts_per_step=6")
    runs.tandem("train", RECIPE, "--on", "ray", "--run.name=three", "--ray.nodes=3", "--trainer-pods", "3", *mesh)
    runs.tandem("train", RECIPE, "--run.name=local", *mesh)
    ended(runs, "three")
    logs = runs.directory("three") / "logs" / "pods"
    assert all(re.search(rf"pod ray-{number} trains with rank \d", (logs / f"ray-{number}" / "pod.log").read_text()) for number in (1, 2))
    assert runs.model("three") == runs.model("local") and left_behind(runs.folder) == []


def test_a_run_is_cancelled_after_its_step_or_at_once_and_is_resumed_as_another_job(runs: LaunchedRuns) -> None:
    long = ("--run.max_steps=1000000", "--checkpoint.every_steps=100000")
    runs.tandem("train", TINY, "--on", "ray", "--run.name=job", *long)
    runs.wait_for_step("job", 3)
    assert runs.refusal("resume", "runs/job", "--on", "local").startswith("'runs/job' is running as job job-")
    assert runs.tandem("cancel", "runs/job").startswith("asked job job-")
    status = runs.wait_for_state("job", "stopped", "failed")
    assert status["state"] == "stopped" and status["checkpoint"] == status["steps"] >= 3, (status, runs.output("job"))
    runs.tandem("resume", "runs/job")
    runs.wait_for_step("job", status["steps"] + 3)
    assert runs.tandem("cancel", "runs/job", "--now").startswith("cancelled job job-")
    assert runs.status("job")["state"] == "stopped" and left_behind(runs.folder) == []
    steps = status["steps"] + 2
    runs.tandem("resume", "runs/job", "--on", "local", f"--run.max_steps={steps}")
    runs.tandem("train", TINY, "--run.name=one", f"--run.max_steps={steps}", "--checkpoint.every_steps=100000")
    assert runs.model("job") == runs.model("one")


def test_pods_that_join_and_leave_while_the_run_trains_take_no_bit_with_them(runs: LaunchedRuns) -> None:
    long = ("--run.max_steps=200", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=200", "--checkpoint.every_steps=50")
    runs.tandem("train", RECIPE, "--on", "ray", "--run.name=scaled", "--ray.max_nodes=2", *long)
    assert runs.tandem("scale", "runs/scaled", "2").endswith(" for 2 nodes\n")
    assert runs.refusal("scale", "runs/scaled", "3").startswith("NODES is 3, and this run may have 1 to 2 nodes;")
    until = time.monotonic() + 240
    while "pod 1 (ray-1) joined the run" not in runs.output("scaled"):
        assert time.monotonic() < until, runs.output("scaled")
        time.sleep(0.2)
    runs.tandem("scale", "runs/scaled", "1")
    runs.tandem("train", RECIPE, "--run.name=local", *long)
    ended(runs, "scaled")
    assert runs.model("scaled") == runs.model("local") and left_behind(runs.folder) == []
    assert runs.refusal("scale", "runs/local", "2").startswith("the run in 'runs/local' was placed by 'local', which gives a run its nodes when it starts;")


def test_a_run_that_cannot_work_has_failed_with_the_line_that_says_why(runs: LaunchedRuns) -> None:
    runs.tandem("train", TINY, "--on", "ray", "--run.name=large", "--machine.memory_gib=0.01")
    status = runs.wait_for_state("large", "finished", "failed", "stopped")
    assert status["state"] == "failed" and "memory" in status["reason"], (status, runs.output("large"))
    assert left_behind(runs.folder) == []
