"""Runs in a pod whose trainer keeps its newest checkpoints in memory and on a local disk: processes that are killed have their state back from there, and the
run ends with the bits of an undisturbed one."""

import os
import signal
import time
from pathlib import Path

import pytest
from pod_runs import PodRun, difference, finish, trained

pytestmark = pytest.mark.full
# One checkpoint in the folder, at the end, and one of the start.
SETTINGS = ("--checkpoint.every_steps=100", "--checkpoint.keep=1")
MEMORY = "--checkpoint.memory_every_steps=1"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """Without faults, and without any tier before the folder."""
    return trained(tmp_path_factory.mktemp("expected"), *SETTINGS)


def assert_same(run: PodRun, expected: PodRun) -> None:
    assert difference(run, expected) == [] and run.left_behind() == []


@pytest.mark.parametrize(
    "fault",
    [
        "trainer_worker:before:train:4", "trainer_shim:before:register:4", "trainer_worker:before:offload:3", "trainer_worker:before:copy_checkpoint:4",
        "trainer_worker:after:copy_checkpoint:4",
    ],
)  # fmt: skip
def test_a_trainer_that_is_killed_goes_on_from_memory_and_reads_nothing_of_the_folder(fault: str, expected: PodRun, tmp_path: Path) -> None:
    run, step = PodRun(tmp_path), int(fault.rpartition(":")[2])
    done = run.train(*SETTINGS, MEMORY, "--fault", fault)
    assert done.returncode == 0, done.stdout + done.stderr
    [event] = run.loaded()
    assert event["tier"] == "memory" and 1 <= event["step"] <= step
    assert event["read_bytes"] == {"memory": event["bytes"], "folder": 0} and event["bytes"] > 0
    assert "kept by one node alone, and do not survive its loss" in done.stdout + done.stderr
    assert_same(run, expected)


def test_ranks_of_two_pods_go_on_from_memory_when_one_is_killed(tmp_path: Path) -> None:
    two = ("--parallel.data=2", "--pods.count=2", "--pods.trainer_count=2")
    quiet, run = PodRun(tmp_path / "quiet"), PodRun(tmp_path / "run")
    assert quiet.train(*SETTINGS, *two).returncode == 0
    done = run.train(*SETTINGS, *two, MEMORY, "--fault", "pod1_trainer_shim:before:train:4")
    assert done.returncode == 0, done.stdout + done.stderr
    [event] = run.loaded()
    assert event["tier"] == "memory" and event["read_bytes"]["folder"] == 0 and len(event["where"]) == 4, "an index and a file of each rank"
    assert_same(run, quiet)


def test_without_its_keeper_a_run_goes_on_from_the_local_disk_and_without_that_from_the_folder(expected: PodRun, tmp_path: Path) -> None:
    for lost in ("memory", "memory and local"):
        run = PodRun(tmp_path / lost)
        local = f"--checkpoint.local_directory={tmp_path / lost / 'nvme'}"
        command = run.begin(
            "train", str(run.recipe), f"--run.directory={run.parent}", "--run.name=run", *SETTINGS, MEMORY, local, "--checkpoint.local_every_steps=1",
            "--fault", "trainer_worker:before:train:5",
        )  # fmt: skip
        ends, metrics = time.monotonic() + 200, run.directory / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
            assert command.poll() is None and time.monotonic() < ends
            time.sleep(0.01)
        keepers = [pid for pid, line in run.processes().items() if "memory.keeper" in line]
        assert len(keepers) == 1
        os.kill(keepers[0], signal.SIGKILL)
        if lost != "memory":
            for path in (tmp_path / lost / "nvme").rglob("*.safetensors"):
                path.write_bytes(b"")
        done = finish(command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_same(run, expected)


def test_a_run_whose_processes_are_all_killed_is_resumed_from_its_local_disk(expected: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    local = (f"--checkpoint.local_directory={tmp_path / 'nvme'}", "--checkpoint.local_every_steps=1")
    done = run.train(*SETTINGS, *local, "--fault", "pod:before:commit_scores:4")
    assert done.returncode == -9
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is loaded from the local disk" in done.stdout + done.stderr
    [event] = run.loaded()
    assert event["tier"] == "local" and event["step"] >= 1 and event["read_bytes"]["folder"] == 0
    assert list((tmp_path / "nvme").iterdir()) == [], "a run that has finished leaves nothing there"
    assert_same(run, expected)


def test_without_a_whole_checkpoint_anywhere_else_the_copy_in_storage_is_fetched(expected: PodRun, tmp_path: Path) -> None:
    run, copies = PodRun(tmp_path), tmp_path / "copies"
    settings = ("--checkpoint.every_steps=2", "--checkpoint.keep=1", f"--checkpoint.upload={copies}")
    command = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", "--run.name=run", *settings, "--fault", "trainer_worker:before:train:5")
    ends = time.monotonic() + 200
    while not (copies / "step-4" / "COMMIT").exists():
        assert command.poll() is None and time.monotonic() < ends
        time.sleep(0.002)
    for path in (run.directory / "checkpoints").glob("step-*/rank-00000.safetensors"):
        path.write_bytes(b"")
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    [event] = run.loaded()
    assert event["tier"] == "upload" and event["step"] == 4 and event["read_bytes"]["upload"] == event["bytes"] > 0
    assert "no checkpoint in the run's folder is whole; that of step 4 is fetched from" in done.stdout + done.stderr
    assert_same(run, expected)
