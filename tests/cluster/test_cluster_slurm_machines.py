"""Slurm on two machines of their own (network namespaces, each with its own shared memory): addresses, and the loss of one of them."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED as WHY_NO_ETCD
from etcd_server import program
from launched_runs import LaunchedRuns
from network import Host, Network, why_not
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed

pytestmark = pytest.mark.full


def _inside(host: Host, *command: str) -> list[str]:
    """Returns the command that runs ``command`` on ``host``. Not by ``ip netns exec``, which hides the cgroups that a slurmd looks at."""
    whole = host.inside(*command)
    return ["nsenter", f"--net=/run/netns/{host.name}", *whole[whole.index("unshare") :]]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[Network, SlurmCluster]]:
    if why := (WHY_SKIPPED if not is_installed() else WHY_NO_ETCD if program() is None else why_not()):
        pytest.skip(why)
    network = Network()
    hosts = [network.add(name, number) for number, name in enumerate(("n1", "n2"), start=1)]
    for host in hosts:
        # More than the preflight asks for.
        host.shm_mib = 200
    address = hosts[0].address.rpartition(".")[0] + ".254"
    cluster = SlurmCluster(tmp_path / "slurm", address=address, addresses=[host.address for host in hosts], inside=[partial(_inside, host) for host in hosts])
    try:
        yield network, cluster.start()
    finally:
        cluster.clear()
        cluster.stop()
        network.close()


def test_a_run_over_two_machines_has_the_bits_of_one_also_when_slurm_loses_a_machine_and_has_it_again(
    network: tuple[Network, SlurmCluster], tmp_path: Path
) -> None:
    net, cluster = network
    runs = LaunchedRuns(tmp_path, cluster.environment)
    long = ("--run.max_steps=40", "--evaluation.every_steps=40", "--checkpoint.every_steps=5", "--parallel.data=2")
    runs.tandem("train", RECIPE, "--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--trainer-pods", "2", *long)
    runs.wait_for_step("two", 7)
    address = net.hosts["n2"].address
    assert f"pod n2 joined run 'two' at {address}:" in runs.output("two") and "pod n2 trains with rank 1" in runs.output("two")
    net.hosts["n2"].plug(False)
    ends = time.monotonic() + 180
    while "Restarts=1" not in cluster.ask("scontrol", "show", "job"):
        assert time.monotonic() < ends, (runs.output("two"), cluster.ask("scontrol", "show", "job"))
        time.sleep(0.5)
    net.hosts["n2"].plug(True)
    runs.tandem("train", RECIPE, "--run.name=one", *long)
    assert runs.wait_for_state("two", "finished", "failed", "stopped")["state"] == "finished", runs.output("two")
    two, one = (PodRun(tmp_path / "runs", name=name) for name in ("two", "one"))
    assert two.events("resume")[-1].detail["step"] >= 5
    assert difference(two, one) == []
