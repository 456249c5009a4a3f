"""Jobs of a real Slurm on several nodes, queued again, cancelled and at the end of their time: nothing is lost, and no bit is another."""

import json
import time
from pathlib import Path

import pytest
from launched_runs import TINY, LaunchedRuns
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import SlurmCluster

from tandem.runtime.records.journal import Journal

pytestmark = pytest.mark.full
LONG = ("--run.max_steps=1000000", "--checkpoint.every_steps=100000")
"""A run on data that does not end by itself, nor save by itself."""


def ran(slurm: LaunchedRuns, name: str) -> PodRun:
    return PodRun(slurm.folder / "runs", name=name)


def job_of(slurm: LaunchedRuns, name: str) -> str:
    return str(json.loads((slurm.directory(name) / "launch" / "record.json").read_text())["job"])


def joined(run: PodRun) -> list[str]:
    return [event.detail["name"] for event in run.events("membership") if "joined" in event.detail]


def test_a_run_over_two_nodes_has_the_bits_of_one_pod_and_leaves_nothing_on_them(slurm: LaunchedRuns) -> None:
    slurm.tandem("train", RECIPE, "--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--pods.min_count=2")
    slurm.tandem("train", RECIPE, "--run.name=one")
    status = slurm.wait_for_state("two", "finished", "failed", "stopped")
    assert status["state"] == "finished", slurm.output("two")
    assert joined(ran(slurm, "two")) == ["n2"]
    assert difference(ran(slurm, "two"), ran(slurm, "one")) == []
    assert (slurm.directory("two") / "logs" / "pods" / "n2" / "rollout_shim.log").is_file()
    assert "pod n2 joined" in slurm.tandem("logs", "runs/two", "--role", "pods/n2/rollout_shim")
    assert left_behind(slurm) == []


def test_a_run_of_two_nodes_goes_on_with_one_though_the_etcd_of_its_first_job_has_ended(slurm: LaunchedRuns) -> None:
    slurm.tandem("train", RECIPE, "--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--run.max_steps=2")
    slurm.tandem("train", RECIPE, "--run.name=one", "--run.max_steps=4")
    assert slurm.wait_for_state("two", "finished", "failed", "stopped")["steps"] == 2, slurm.output("two")
    slurm.tandem("resume", "runs/two", "--slurm.nodes=1", "--run.max_steps=4")
    assert slurm.wait_for_state("two", "finished", "failed", "stopped")["steps"] == 4, slurm.output("two")
    assert slurm.model("two") == slurm.model("one")


def test_trainer_ranks_on_two_nodes_have_the_bits_of_two_ranks_on_one(slurm: LaunchedRuns) -> None:
    mesh = ("--parallel.data=2",)
    slurm.tandem("train", RECIPE, "--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--trainer-pods", "2", *mesh)
    slurm.tandem("train", RECIPE, "--run.name=one", *mesh)
    assert slurm.wait_for_state("two", "finished", "failed", "stopped")["state"] == "finished", slurm.output("two")
    assert "pod n2 trains with rank 1" in slurm.output("two")
    found, expected = ran(slurm, "two"), ran(slurm, "one")
    assert {name: data for name, data in found.results().items() if name.startswith("model/")} == {
        name: data for name, data in expected.results().items() if name.startswith("model/")
    }
    assert left_behind(slurm) == []


def test_a_job_that_is_queued_again_goes_on_from_its_checkpoint_with_the_same_weights(slurm: LaunchedRuns, slurm_cluster: SlurmCluster) -> None:
    long = ("--run.max_steps=60", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=60", "--checkpoint.every_steps=5")
    slurm.tandem("train", RECIPE, "--on", "slurm", "--run.name=again", "--slurm.nodes=2", *long)
    slurm.wait_for_step("again", 12)
    slurm_cluster.ask("scontrol", "requeue", job_of(slurm, "again"))
    slurm.tandem("train", RECIPE, "--run.name=one", *long)
    assert slurm.wait_for_state("again", "finished", "failed", "stopped")["state"] == "finished", slurm.output("again")
    resumed = [event.detail["step"] for event in ran(slurm, "again").events("resume")]
    assert len(resumed) >= 1 and resumed[-1] >= 10, resumed
    assert difference(ran(slurm, "again"), ran(slurm, "one")) == []


def test_the_signal_before_the_time_limit_leaves_a_checkpoint_and_a_resume_is_a_job_again(slurm: LaunchedRuns, slurm_cluster: SlurmCluster) -> None:
    limit = ("--slurm.time=0-00:02:00", "--slurm.signal_s=30", "--slurm.requeue=false")
    slurm.tandem("train", TINY, "--on", "slurm", "--run.name=limit", *limit, *LONG)
    status = slurm.wait_for_state("limit", "finished", "failed", "stopped")
    facts = slurm_cluster.ask("scontrol", "show", "job", job_of(slurm, "limit"))
    assert status["state"] == "stopped" and "ExitCode=75:0" in facts and "JobState=FAILED" in facts, (status, facts)
    assert status["checkpoint"] == status["steps"] > 0, status
    assert "which is saved" in slurm.output("limit")
    steps = status["steps"] + 3
    slurm.tandem("resume", "runs/limit", f"--run.max_steps={steps}", "--slurm.time=0-00:10:00")
    assert slurm.wait_for_state("limit", "finished", "failed", "stopped")["state"] == "finished", slurm.output("limit")
    slurm.tandem("train", TINY, "--run.name=one", f"--run.max_steps={steps}", "--checkpoint.every_steps=100000")
    assert slurm.model("limit") == slurm.model("one")


def test_at_its_time_limit_a_job_queues_itself_again_and_ends_with_the_same_weights(slurm: LaunchedRuns, slurm_cluster: SlurmCluster) -> None:
    steps = ("--run.max_steps=400", "--checkpoint.every_steps=100000")
    slurm.tandem("train", TINY, "--on", "slurm", "--run.name=again", *steps)
    slurm.wait_for_step("again", 3)
    # What Slurm sends before the limit.
    slurm_cluster.ask("scancel", "--batch", "--signal=USR1", job_of(slurm, "again"))
    status = slurm.wait_for_state("again", "finished", "failed", "stopped")
    assert status["state"] == "finished" and "Restarts=1" in slurm_cluster.ask("scontrol", "show", "job", job_of(slurm, "again")), slurm.output("again")
    slurm.tandem("train", TINY, "--run.name=one", *steps)
    with Journal(slurm.directory("again") / "journal.sqlite", read_only=True) as journal:
        resumed = [event.detail["step"] for event in journal.events() if event.kind == "resume"]
    assert 3 <= resumed[-1] < 400, resumed
    assert slurm.model("again") == slurm.model("one") and slurm.rows("again") == list(range(400))


def test_a_run_is_cancelled_after_its_step_or_at_once_and_not_started_twice(slurm: LaunchedRuns) -> None:
    slurm.tandem("train", TINY, "--on", "slurm", "--run.name=job", *LONG)
    slurm.wait_for_step("job", 3)
    job = job_of(slurm, "job")
    assert slurm.refusal("resume", "runs/job").startswith(f"'{slurm.directory('job')}' is running as job {job} on n1; wait for it, or end it first:")
    assert slurm.refusal("resume", "runs/job", "--on", "local").startswith(f"'runs/job' is running as job {job} on n1;")
    assert slurm.tandem("cancel", "runs/job") == f"asked job {job} to stop after its step, which it saves first\n"
    status = slurm.wait_for_state("job", "stopped", "failed")
    assert status["state"] == "stopped" and status["checkpoint"] == status["steps"] >= 3, (status, slurm.output("job"))
    assert slurm.refusal("cancel", "runs/job") == "the run in 'runs/job' is not running on Slurm, so there is nothing to cancel"
    slurm.tandem("resume", "runs/job")
    slurm.wait_for_step("job", status["steps"] + 3)
    assert slurm.tandem("cancel", "runs/job", "--now") == f"cancelled job {job_of(slurm, 'job')}\n"
    assert slurm.wait_for_state("job", "stopped", "failed")["state"] == "stopped"
    # A job that waits has nothing to save.
    slurm.tandem("resume", "runs/job", "--slurm.options=[--begin=now+1hour]")
    assert slurm.status("job")["state"] == "queued"
    assert slurm.refusal("resume", "runs/job", "--on", "local").startswith(f"'runs/job' is queued as job {job_of(slurm, 'job')};")
    assert slurm.tandem("cancel", "runs/job").startswith("cancelled job ")
    assert slurm.status("job")["state"] == "stopped"


def test_a_run_that_cannot_work_on_its_node_has_failed_with_the_line_that_says_why(slurm: LaunchedRuns) -> None:
    slurm.tandem("train", TINY, "--on", "slurm", "--run.name=large", "--machine.memory_gib=0.01")
    status = slurm.wait_for_state("large", "finished", "failed", "stopped")
    assert status["state"] == "failed" and status["reason"].startswith("FAILED. ") and "memory" in status["reason"], (status, slurm.output("large"))
    assert not (slurm.directory("large") / "journal.sqlite").exists()


def left_behind(slurm: LaunchedRuns) -> list[str]:
    """Returns the command lines of processes that still have the test's folder in them, after they had time to end."""
    ends = time.monotonic() + 20
    while (found := _processes(str(slurm.folder))) and time.monotonic() < ends:
        time.sleep(0.2)
    return found


def _processes(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found
