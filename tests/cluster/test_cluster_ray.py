"""What cannot be placed on Ray is refused in one line, and how a job has ended is known without it."""

import importlib.util
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launched_runs import COMMAND, TINY

from tandem.cluster.launch.ended import CANCELLED, Ended, read_end, write_end
from tandem.cluster.launch.record import Record, write_record
from tandem.config.ray import RayConfig
from tandem.runtime.records.run_lock import RunLock
from tandem.runtime.rpc.listener import listen

Here = Callable[..., str]
has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed, so runs on Ray are NOT tested")
RL = Path(__file__).parents[1] / "pod" / "tiny.yaml"


@has_ray
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("nodes=0", "'ray.nodes' is 0; it must be at least 1"),
        ("nodes=20000", "'ray.nodes' is 20000; it must be at most 10000"),
        ("nodes=2", "'ray.nodes' is 2 and 'parallel.data' 1, which 2 nodes with ranks do not divide; set parallel.data to a multiple of 2"),
        ("max_nodes=2", "'ray.max_nodes' is 2 and 'parallel.data' 1, which 2 nodes with ranks do not divide; set parallel.data to a multiple of 2"),
        ("num_cpus=-1", "'ray.num_cpus' is -1.0; it must be 0 (not asked for) or more"),
        ("num_cpus=4", "'ray.num_cpus' is 4.0, and the cluster that is started on this machine has nodes of one core; leave it out"),
        ("memory_gib=-2", "'ray.memory_gib' is -2.0; it must be 0"),
        ("address=10.0.0.1", "'ray.address' is '10.0.0.1', which has no port; give HOST:PORT"),
        ("address=ray://10.0.0.1:10001", "'ray.address' is 'ray://10.0.0.1:10001'; give HOST:PORT"),
        ("resources={GPU: 1}", "'ray.resources' has 'GPU'; set ray.num_gpus instead"),
        ("resources={spot: 0}", "'ray.resources.spot' is 0.0; it must be above 0"),
        ("ndoes=2", "unknown key 'ray.ndoes'"),
        ("num_gpus=5000", "'ray.num_gpus' is 5000 for each of 1 nodes, and this machine has "),
    ],
)
def test_a_section_that_asks_for_what_is_no_amount_is_refused(here: Here, setting: str, line: str, tmp_path: Path) -> None:
    assert here("train", TINY, "--on", "ray", "--dry-run", f"--ray.{setting}").startswith(line)
    assert not (tmp_path / "runs").exists()


def test_fewer_most_nodes_than_nodes_are_refused(here: Here) -> None:
    assert here("train", RL, "--on", "ray", "--ray.nodes=3", "--ray.max_nodes=2").startswith("'ray.max_nodes' is 2 and ray.nodes 3; raise max_nodes")
    assert RayConfig(nodes=2).most_nodes == 2 and RayConfig(nodes=2, max_nodes=5).most_nodes == 5


def test_without_ray_or_an_etcd_to_start_a_run_is_refused(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("tandem.cluster.etcd_process.etcd_program", lambda: None)
        patched.setattr("tandem.cluster.launch.ray.launcher.check_installed", lambda: None)
        assert here("train", RL, "--on", "ray", "--ray.nodes=2").startswith("a run on several machines needs etcd, and there is none on the PATH;")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert here("train", TINY, "--on", "ray") == "--on ray needs the package 'ray', which is not installed here; install it with: pip install 'tandem-rl[ray]'"
    assert not (tmp_path / "runs").exists()


@has_ray
def test_an_address_at_which_no_ray_answers_is_refused_and_leaves_nothing(here: Here, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        assert here("train", TINY, "--on", "ray", f"--ray.address={address}").startswith(f"no Ray answers at '{address}' (Connection refused); start it")
    assert not (tmp_path / "runs").exists()


@has_ray
def test_a_port_that_is_taken_is_refused_before_a_cluster_is_started(here: Here, tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert here("train", TINY, "--on", "ray", f"--metrics.port={port}").startswith(f"port {port} on 127.0.0.1 cannot be taken (Address already in use)")
    assert not (tmp_path / "runs").exists()


@has_ray
def test_a_run_that_works_in_another_container_is_not_placed_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(TINY.read_text())
    apart = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes may be made here, so a run in another container is NOT tested")
    with RunLock(run):
        # Its holder is not among the locks that this process sees.
        done = subprocess.run([*apart, str(COMMAND), "resume", str(run), "--on", "ray"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"tandem: the run directory {run} is in use by process {os.getpid()}; wait for it"), done.stderr
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "lock"]


def test_the_end_of_a_job_is_known_when_its_cluster_is_gone(here: Here, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(TINY.read_text())
    write_record(run, Record("ray", job="run-1", folder=str(tmp_path)))
    assert json.loads(here("status", run, "--json"))["reason"] == "its Ray cluster has ended"
    (run / "logs" / "ray-1.out").write_text("[ray] job run-1 on node 'node-1'\ntandem: the disk is full\n")
    for status, state, reason in ((1, "failed", "the disk is full"), (75, "stopped", ""), (CANCELLED, "stopped", "")):
        write_end(run, Ended("run-1", status))
        found = json.loads(here("status", run, "--json"))
        assert (found["state"], found["where"], found["reason"]) == (state, "job run-1", reason)
    assert read_end(run, "run-2") is None
    assert here("cancel", run) == f"the run in '{run}' is not running on Ray, so there is nothing to cancel"
    assert here("logs", run).endswith("tandem: the disk is full\n")
