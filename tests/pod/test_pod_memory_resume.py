"""The machine of a run's controller is lost, with every process on it, its keeper and its local disk: the run is resumed on another machine, where the trainer
has its state back from the memory of a pod that joined, and ends with the bits of an undisturbed run."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from four_pods import FourPods
from joined_machines import Machines, needs_etcd, shim_of
from kept_checkpoints import wait_until_kept
from pod_runs import PodRun, difference, finish, trained

pytestmark = pytest.mark.full
STEPS = 12
SETTINGS = ("--parallel.data=2", "--checkpoint.every_steps=100", "--checkpoint.keep=1")
MEMORY = ("--checkpoint.memory_every_steps=1",)
ALONE = ("--checkpoint.every_steps=100", "--checkpoint.keep=1", f"--run.max_steps={STEPS}")


def kill_machine(run: PodRun) -> None:
    """Ends every process of the controller's machine at once."""
    processes = run.processes()
    assert any("memory.keeper" in line for line in processes.values()), processes
    for pid in processes:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    return trained(tmp_path_factory.mktemp("expected"), *ALONE)


@pytest.fixture
def joined(etcd_server: EtcdServer, tmp_path: Path) -> Iterator[Machines]:
    """A run with a local disk, and pods that keep its checkpoints."""
    made = Machines(tmp_path, etcd_server, (*MEMORY, *ALONE))
    yield made
    made.close()


@needs_etcd
def test_a_resume_elsewhere_reads_the_memory_of_a_peer_and_nothing_of_the_folder(joined: Machines, expected: PodRun, tmp_path: Path) -> None:
    pods = {name: joined.pod(name, f"--pods.host=127.0.0.{n}") for n, name in ((2, "a"), (3, "b"))}
    local = ("--checkpoint.local_every_steps=1", f"--checkpoint.local_directory={tmp_path / 'nvme'}")
    command = joined.train("--pods.min_count=2", *local)
    wait_until_kept(joined.run.directory, 4, lambda: command.poll() is None)
    keepers = {pid for pod in joined.pods.values() for pid, line in pod.processes().items() if "memory.keeper" in line}
    kill_machine(joined.run)
    finish(command)
    shutil.rmtree(tmp_path / "nvme")
    # A pod whose life ends as well joins again, with what it has kept.
    os.kill(shim_of(joined.pods["a"]), signal.SIGKILL)
    done = joined.run.resume("--pods.host=127.0.0.4", f"--checkpoint.local_directory={tmp_path / 'other'}")
    assert done.returncode == 0, done.stdout + done.stderr
    [event] = joined.run.loaded()
    assert event["tier"] == "memory" and event["step"] >= 4
    assert event["read_bytes"] == {"memory": event["bytes"], "local": 0, "folder": 0} and set(event["where"].values()) <= {"a", "b"}
    assert difference(joined.run, expected) == []
    for pod in pods.values():
        assert finish(pod).returncode == 0
    assert joined.left_behind() == [] and not any(Path(f"/proc/{pid}").exists() for pid in keepers)


@needs_etcd
def test_a_resume_that_finds_no_keeper_says_so_and_reads_the_folder(joined: Machines, expected: PodRun) -> None:
    pod = joined.pod("a", "--pods.host=127.0.0.2")
    command = joined.train("--pods.min_count=2")
    wait_until_kept(joined.run.directory, 3, lambda: command.poll() is None)
    kill_machine(joined.run)
    finish(command)
    for pid in joined.pods["a"].processes():
        os.kill(pid, signal.SIGKILL)
    finish(pod)
    done = joined.run.resume("--pods.host=127.0.0.3", "--pods.min_count=1")
    assert done.returncode == 0, done.stdout + done.stderr
    [event] = joined.run.loaded()
    assert event["tier"] == "folder" and event["step"] == 0
    assert "the memory of a is not in reach; what it had is read from the next tier" in done.stdout + done.stderr
    assert difference(joined.run, expected) == [] and joined.left_behind() == []


@needs_etcd
def test_with_the_coordination_store_lost_too_the_resume_names_it_and_then_reads_the_folder(expected: PodRun, tmp_path: Path) -> None:
    """The store was on the controller's machine. One elsewhere takes its place."""
    stores = [EtcdServer(tmp_path / f"etcd-{number}", options=("--unsafe-no-fsync",)) for number in (1, 2)]
    stores[0].start()
    machines = Machines(tmp_path, stores[0], (*MEMORY, *ALONE))
    try:
        pod = machines.pod("a", "--pods.host=127.0.0.2")
        command = machines.train("--pods.min_count=2")
        wait_until_kept(machines.run.directory, 3, lambda: command.poll() is None)
        kill_machine(machines.run)
        stores[0].kill()
        finish(command)
        refused = machines.run.resume("--pods.host=127.0.0.3", "--coordination.deadline_s=2")
        assert refused.returncode != 0 and "etcd" in refused.stderr, refused.stderr
        stores[1].start()
        machines.etcd = stores[1]
        elsewhere = (f"--coordination.endpoints=[{stores[1].url}]", "--pods.host=127.0.0.3", "--pods.min_count=1")
        refused = machines.run.resume(*elsewhere)
        assert refused.returncode != 0 and "--coordination.cluster_id=" in refused.stderr, refused.stderr
        cluster = refused.stderr.rpartition("--coordination.cluster_id=")[2].split()[0]
        again = machines.pod("b", "--pods.host=127.0.0.4")
        done = machines.run.resume(*elsewhere, f"--coordination.cluster_id={cluster}")
        assert done.returncode == 0, done.stdout + done.stderr
        [event] = machines.run.loaded()
        assert event["tier"] == "folder" and difference(machines.run, expected) == []
        pod.terminate()
        finish(pod)
        assert finish(again).returncode == 0 and machines.left_behind() == []
    finally:
        machines.close()
        for store in stores:
            store.kill()


def test_ranks_on_two_machines_go_on_from_memory_after_the_loss_of_the_controllers(four: FourPods, quiet: PodRun) -> None:
    """Network namespaces: rank 0 was on the lost machine, rank 1 on that of a pod."""
    four.settings = (*SETTINGS, *MEMORY, "--pods.trainer_count=2")
    four.start()
    wait_until_kept(four.run.directory, 4, lambda: four.commands["run"].poll() is None)
    kill_machine(four.run)
    four.commands["run"].wait()
    host = four.hosts["p3"]
    four.run.inside = host.inside
    four.commands["run"] = four.run.begin("resume", str(four.run.directory), "--pods.min_count=1", f"--pods.host={host.address}")
    four.wait()
    assert four.ends == [] and difference(four.run, quiet) == [] and four.left_behind() == []
    event = four.run.loaded()[0]
    assert event["tier"] == "memory" and event["step"] >= 4 and event["read_bytes"] == {"memory": event["bytes"], "folder": 0}
