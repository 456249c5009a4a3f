"""Checkpoints in the memory of other machines (network namespaces, a real etcd): a machine is killed with its keeper and its ranks, and the trainer has its
state back from the memory of another one, without a byte of the run's folder."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from etcd_server import EtcdServer
from four_pods import FourPods
from joined_machines import Machines, needs_etcd
from kept_checkpoints import wait_until_kept
from pod_runs import PodRun, difference, finish
from random_faults import check_undisturbed

from tandem.runtime.records.checkpoint_tiers import read_tiers
from tandem.runtime.records.journal import Journal

pytestmark = pytest.mark.full
STEPS = 8
# One checkpoint in the folder of the start, and one at the end.
SETTINGS = ("--parallel.data=2", "--checkpoint.every_steps=100", "--checkpoint.keep=1")
MEMORY = "--checkpoint.memory_every_steps=1"


@pytest.fixture
def kept(four: FourPods) -> FourPods:
    """Four pods, of which the run's own and one that joined have a rank each, and whose memory keeps the checkpoints."""
    four.settings = (*SETTINGS, MEMORY, "--pods.trainer_count=2")
    return four


def events(run: PodRun, kind: str) -> list[dict[str, Any]]:
    return [event.detail for event in run.events(kind)]


def test_a_machine_is_killed_with_its_keeper_and_its_rank_and_no_byte_is_read_of_the_folder(kept: FourPods, quiet: PodRun) -> None:
    kept.start()
    kept.wait_for_step(2)
    where = wait_until_kept(kept.run.directory, 3, lambda: kept.commands["run"].poll() is None)
    for rank in (0, 1):
        assert len({node for node, ranks in where.items() if rank in ranks}) == 2, "its own node, and another one"
    victims = [name for name, pod in kept.pods.items() if any("tandem.pod.trainer_worker" in line for line in pod.processes().values())]
    assert len(victims) == 1
    processes = kept.pods[victims[0]].processes()
    assert any("memory.keeper" in line for line in processes.values()), processes
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    check_undisturbed(kept, quiet)
    loaded = events(kept.run, "checkpoint_loaded")
    assert loaded and all(event["tier"] == "memory" and event["step"] >= 2 for event in loaded), loaded
    for event in loaded:
        assert event["read_bytes"] == {"memory": event["bytes"], "folder": 0} and event["bytes"] > 0
    assert victims[0] not in loaded[0]["where"].values() and any(event["role"] == "trainer" for event in events(kept.run, "recovery"))


@needs_etcd
def test_under_tls_the_pods_that_draw_keep_the_checkpoints_of_the_trainer(etcd_server: EtcdServer, undisturbed: PodRun, tmp_path: Path) -> None:
    """The pod is at an address of its own on this machine, which is a node of its own."""
    authority = certificate(tmp_path, "authority")
    for name in ("run", "a"):
        certificate(tmp_path, name, authority)
    machines = Machines(tmp_path, etcd_server, (MEMORY, "--checkpoint.keep=2"))

    def files(name: str) -> list[str]:
        each = (("cert", f"{name}.crt"), ("key", f"{name}.key"), ("ca", "authority.crt"))
        return [f"--pods.tls_{what}_file={tmp_path / file}" for what, file in each]

    try:
        pod = machines.pod("a", "--pods.host=127.0.0.2", *files("a"))
        done = finish(machines.train("--pods.min_count=2", *files("run"), "--fault", "trainer_worker:before:train:5"))
        assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
        [event] = events(machines.run, "checkpoint_loaded")
        assert event["tier"] == "memory" and event["read_bytes"]["folder"] == 0
        assert "one node alone" not in done.stdout + done.stderr
        with Journal(machines.run.directory / "journal.sqlite", read_only=True) as journal:
            memory = next(state for state in read_tiers(journal) if state.tier == "memory")
        assert memory.where == {socket.gethostname(): [0], "a": [0]} and memory.step == 6 and not memory.left_out
        assert finish(pod).returncode == 0 and machines.left_behind() == []
    finally:
        machines.close()
