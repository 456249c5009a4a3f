"""Ranks of the trainer on two machines, each with a local disk: every rank has its state back from the disk of its own machine, and where a machine is lost
with its disk, from the next tier. The bits are those of an undisturbed run."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from joined_machines import Machines, needs_etcd
from pod_runs import PodRun, difference, finish, trained

from tandem.runtime.records.checkpoint_tiers import read_tiers
from tandem.runtime.records.journal import Journal

pytestmark = [pytest.mark.full, needs_etcd]
SETTINGS = ("--parallel.data=2", "--checkpoint.every_steps=100", "--checkpoint.keep=1", "--run.max_steps=12")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    return trained(tmp_path_factory.mktemp("expected"), *SETTINGS)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def machines(etcd_server: EtcdServer, tmp_path: Path, disk: Path) -> Iterator[Machines]:
    """The controller's machine has rank 0, and one of the pods rank 1."""
    local = (f"--checkpoint.local_directory={disk}", "--checkpoint.local_every_steps=1", "--pods.trainer_count=2")
    made = Machines(tmp_path, etcd_server, (*SETTINGS, *local))
    yield made
    made.close()


def wait_until_written(run: PodRun, step: int) -> dict[str, list[int]]:
    """Waits until a checkpoint of ``step`` or later is on the disks. Returns the ranks by node."""
    ends = time.monotonic() + 240
    while True:
        if (path := run.directory / "journal.sqlite").exists():
            with Journal(path, read_only=True) as journal:
                local = next((state for state in read_tiers(journal) if state.tier == "local"), None)
            assert local is None or not local.left_out, local
            if local is not None and local.step >= step:
                return {node: list(ranks) for node, ranks in local.where.items()}
        assert time.monotonic() < ends
        time.sleep(0.05)


def rank_of(pod: PodRun) -> int:
    return next(pid for pid, line in pod.processes().items() if "tandem.pod.trainer_worker" in line)


def test_a_killed_rank_is_restarted_and_each_reads_its_own_disk(machines: Machines, expected: PodRun, disk: Path) -> None:
    pod = machines.pod("a", "--pods.host=127.0.0.2")
    command = machines.train("--pods.min_count=2")
    assert wait_until_written(machines.run, 3) == {"127.0.0.1": [0], "127.0.0.2": [1]}
    [of_run] = disk.iterdir()
    for rank, host in enumerate(("127.0.0.1", "127.0.0.2")):
        steps = list((of_run / f"node-{host}").glob("step-*"))
        assert steps and all(not (step / f"rank-0000{1 - rank}.safetensors").exists() for step in steps)
    os.kill(rank_of(machines.pods["a"]), signal.SIGKILL)
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    [event] = machines.run.loaded()
    assert event["tier"] == "local" and event["step"] >= 2 and event["read_bytes"] == {"local": event["bytes"], "folder": 0}
    assert event["where"] == {
        "rank-00000.json": "127.0.0.1", "rank-00000.safetensors": "127.0.0.1", "rank-00001.json": "127.0.0.2", "rank-00001.safetensors": "127.0.0.2",
    }  # fmt: skip
    assert "loaded from the local disks in" in done.stdout + done.stderr
    assert difference(machines.run, expected) == [] and finish(pod).returncode == 0 and machines.left_behind() == []
    assert list(disk.iterdir()) == [], "a run that has finished leaves no checkpoint on a disk"


def test_with_the_machine_of_a_rank_lost_the_next_tier_is_read(machines: Machines, expected: PodRun) -> None:
    pods = {name: machines.pod(name, f"--pods.host=127.0.0.{n}") for n, name in ((2, "a"), (3, "b"))}
    command = machines.train("--pods.min_count=2")
    where = wait_until_written(machines.run, 3)
    lost = "a" if "127.0.0.2" in where else "b"
    for pid in machines.pods[lost].processes():
        os.kill(pid, signal.SIGKILL)
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(event["tier"], event["step"]) for event in machines.run.loaded()][-1] == ("folder", 0)
    reasons = [event.detail["reason"] for event in machines.run.events("checkpoint_damaged")]
    assert reasons and all("in local disk" in reason and "no node has a whole copy of 'rank-00001.json'" in reason for reason in reasons), reasons
    assert difference(machines.run, expected) == []
    for name, pod in pods.items():
        assert (finish(pod).returncode == 0) == (name != lost)
    assert machines.left_behind() == []
