"""Nodes of a run: a pod more than has a place is a spare, a node that fails is cordoned, and the spare in its place changes no bit."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etcd_server import EtcdServer
from joined_machines import Machines, needs_etcd
from nvidia_programs import NvidiaPrograms
from pod_runs import PodRun, difference, finish

from tandem.pod.nodes import Nodes
from tandem.runtime.coordination.cordons import CORDONS, Cordon, cluster_prefix, cordon, cordons, uncordon
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.membership import Member
from tandem.runtime.health.gpu_faults import boot_s

STEPS = ("--run.max_steps=40", "--evaluation.every_steps=40", "--checkpoint.every_steps=5")


def changes(nodes: Nodes, present: list[Member], in_use: list[str]) -> list[dict[str, Any]]:
    nodes.note(present, in_use)
    return nodes.told()


def member(name: str, revision: int = 1, machine: str = "m") -> Member:
    return Member(name, {"agent": "a", "machine": machine}, revision)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[EmbeddedStore, EmbeddedStore]]:
    run, cluster = EmbeddedStore(tmp_path / "run.sqlite"), EmbeddedStore(tmp_path / "cluster.sqlite")
    yield run, cluster
    run.close()
    cluster.close()


# -- the states of nodes ---------------------------------------------------------------------------------------------------


def test_the_first_reason_of_a_cordon_is_kept_and_a_damaged_entry_still_holds(stores: tuple[EmbeddedStore, EmbeddedStore]) -> None:
    store, _ = stores
    cordon(store, "n1", "XID 79:\nfallen off the bus", "a")
    assert cordon(store, "n1", "later", "b").reason == "XID 79: fallen off the bus"
    store.put(CORDONS + "n2", b"\xff{")
    assert {name: each.reason for name, each in cordons(store).items()} == {"n1": "XID 79: fallen off the bus", "n2": "its entry in the store is damaged"}
    assert uncordon(store, "n1") and not uncordon(store, "n1") and set(cordons(store)) == {"n2"}


def test_a_node_is_cordoned_after_its_last_failure_and_a_life_counts_once(stores: tuple[EmbeddedStore, EmbeddedStore]) -> None:
    store, _ = stores
    nodes = Nodes("r", max_failures=2)
    assert changes(nodes, [member("n2"), member("n3")], ["n2"]) == [{"node": "n2", "state": "in use"}, {"node": "n3", "state": "spare"}]
    for life, is_cordoned in ((5, False), (5, False), (9, True)):
        nodes.failed("n2", life, "no answer")
        nodes.look(store)
        assert (nodes.cordon_of(member("n2")) is not None) == is_cordoned, life
    assert cordons(store)["n2"].reason == "its pod was lost 2 times: no answer" and cordons(store)["n2"].by == "r"
    assert changes(nodes, [member("n3")], ["n3"]) == [
        {"node": "n2", "state": "cordoned", "reason": "its pod was lost 2 times: no answer"}, {"node": "n3", "state": "in use"}
    ]  # fmt: skip
    assert changes(nodes, [member("n3")], ["n3"]) == []


def test_nodes_that_are_all_lost_at_once_are_not_cordoned(stores: tuple[EmbeddedStore, EmbeddedStore]) -> None:
    store, _ = stores
    nodes = Nodes("r", max_failures=1)
    changes(nodes, [member("n2"), member("n3"), member("n4")], ["n2", "n3"])
    for name in ("n2", "n3"):
        nodes.failed(name, 5, "etcd is away")
    nodes.look(store)
    assert cordons(store) == {}
    nodes.failed("n3", 6, "no answer")
    nodes.look(store)
    assert set(cordons(store)) == {"n3"}


def test_without_spares_no_failure_cordons_a_node(stores: tuple[EmbeddedStore, EmbeddedStore]) -> None:
    nodes = Nodes("r", max_failures=0)
    for life in range(9):
        nodes.failed("n2", life, "no answer")
        nodes.look(stores[0])
    assert cordons(stores[0]) == {}


def test_a_cordon_of_the_cluster_holds_for_every_run_by_the_name_of_the_pod_or_of_its_machine(stores: tuple[EmbeddedStore, EmbeddedStore]) -> None:
    run, cluster = stores
    cordon(cluster, "machine-7", "ECC errors", "anna")
    nodes = Nodes("r", open_cluster=lambda: cluster)
    nodes.look(run)
    assert nodes.cordon_of(member("pod-a", machine="machine-7")) is not None and nodes.cordon_of(member("pod-b")) is None
    assert changes(nodes, [member("pod-a", machine="machine-7")], []) == [{"node": "pod-a", "state": "cordoned", "reason": "ECC errors"}]


# -- runs with real pods ---------------------------------------------------------------------------------------------------


@pytest.fixture
def machines(tmp_path: Path, etcd_server: EtcdServer) -> Iterator[Machines]:
    made = Machines(tmp_path, etcd_server, ("--pods.max_count=2", "--pods.min_count=2", "--cluster.spares=1", "--pods.heartbeat_timeout_s=5", *STEPS))
    yield made
    made.close()


def wait_for_step(run: PodRun, step: int) -> None:
    path, ends = run.directory / "metrics.jsonl", time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < step:
        assert time.monotonic() < ends
        time.sleep(0.02)


def node_events(run: PodRun) -> list[tuple[str, str]]:
    return [(event.detail["node"], event.detail["state"]) for event in sorted([*run.events("node"), *run.events("cordon")], key=lambda event: event.id)]


def undisturbed(machines: Machines, folder: Path, *more: str) -> PodRun:
    alone = PodRun(folder / "alone")
    done = alone.train(*STEPS, *more)
    assert done.returncode == 0, done.stderr
    return alone


def begin(machines: Machines) -> "tuple[subprocess.Popen[str], dict[str, subprocess.Popen[str]]]":
    """Starts a run when its two pods are there. Returns its command and theirs."""
    pods = {name: machines.pod(name) for name in ("n2", "n3")}
    for name, pod in pods.items():
        machines.wait_for(name, "joined run", pod)
    return machines.train(), pods


def failed_and_spare(machines: Machines) -> list[str]:
    wait_for_step(machines.run, 3)
    states = dict(node_events(machines.run))
    assert sorted(states.values()) == ["in use", "spare"], states
    return sorted(states, key=states.__getitem__)


@needs_etcd
@pytest.mark.full
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_a_node_that_is_killed_or_paused_is_cordoned_and_the_spare_in_its_place_changes_no_bit(
    what: signal.Signals, machines: Machines, tmp_path: Path
) -> None:
    controller, pods = begin(machines)
    failed, spare = failed_and_spare(machines)
    stopped = list(machines.pods[failed].processes())
    for pid in stopped:
        os.kill(pid, what)
    done = finish(controller)
    assert done.returncode == 0, done.stderr
    assert node_events(machines.run)[2:] == [(failed, "cordoned"), (spare, "in use")]
    assert f"node {failed} is cordoned: its pod was lost" in done.stdout + done.stderr
    if what == signal.SIGSTOP:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        pods[failed].terminate()
        pods[failed].wait(60)
    assert difference(machines.run, undisturbed(machines, tmp_path)) == []
    # Cordons of a run end with it.
    assert cordons(EtcdStore(machines.etcd.config(), f"/tandem/{machines.name}/")) == {}
    assert pods[spare].wait(60) == 0 and machines.left_behind() == []


@needs_etcd
@pytest.mark.full
def test_a_node_that_is_cordoned_for_its_numbers_is_released_and_the_spare_in_its_place_changes_no_bit(machines: Machines, tmp_path: Path) -> None:
    controller, pods = begin(machines)
    failed, spare = failed_and_spare(machines)
    store = EtcdStore(machines.etcd.config(), f"/tandem/{machines.name}/")
    cordon(store, failed, "its digests are others", machines.name)
    store.close()
    done = finish(controller)
    assert done.returncode == 0, done.stderr
    assert node_events(machines.run)[2:] == [(failed, "cordoned"), (spare, "in use")] and machines.run.events("recovery") == []
    assert ("left", failed) in machines.members() and pods[failed].wait(60) == 0
    assert difference(machines.run, undisturbed(machines, tmp_path)) == []


@needs_etcd
@pytest.mark.full
def test_two_runs_with_one_etcd_and_nodes_of_the_same_names_do_not_touch_each_other(machines: Machines, tmp_path: Path, etcd_server: EtcdServer) -> None:
    (tmp_path / "other").mkdir()
    other = Machines(tmp_path / "other", etcd_server, machines.settings)
    try:
        (first, _), (second, _) = begin(machines), begin(other)
        failed, spare = failed_and_spare(machines)
        for pid in machines.pods[failed].processes():
            os.kill(pid, signal.SIGKILL)
        assert finish(first).returncode == finish(second).returncode == 0
        assert node_events(machines.run)[2:] == [(failed, "cordoned"), (spare, "in use")]
        assert sorted(state for _, state in node_events(other.run)) == ["in use", "spare"] and other.run.events("recovery") == []
        alone = undisturbed(machines, tmp_path)
        assert difference(machines.run, alone) == difference(other.run, alone) == []
    finally:
        other.close()


# -- nodes that are broken -------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(tmp_path: Path, etcd_server: EtcdServer) -> Iterator[Machines]:
    """Two pods, one of them a spare, on machines with GPUs as far as their driver tells, in a cluster of their own, because its cordons stay."""
    prefix = f"/cluster-{tmp_path.name}-{time.time_ns()}"
    made = Machines(
        tmp_path, etcd_server, ("--pods.max_count=2", "--cluster.spares=1", "--pods.heartbeat_timeout_s=5", f"--coordination.prefix={prefix}",
                                "--health.every_s=0.5", *STEPS),
    )  # fmt: skip
    made.prefix = prefix
    yield made
    made.close()


def cluster_cordons(machines: Machines) -> dict[str, Cordon]:
    config = replace(machines.etcd.config(), prefix=machines.prefix)
    store = EtcdStore(config, cluster_prefix(config))
    found = dict(cordons(store))
    store.close()
    return found


def end_all(pods: "dict[str, subprocess.Popen[str]]") -> None:
    for pod in pods.values():
        if pod.poll() is None:
            pod.terminate()
    for pod in pods.values():
        pod.wait(60)


@needs_etcd
@pytest.mark.full
@pytest.mark.parametrize("trains", [False, True], ids=["rollout", "trainer"])
def test_a_node_with_a_fatal_gpu_error_is_cordoned_in_the_cluster_and_the_spare_in_its_place_changes_no_bit(
    trains: bool, watched: Machines, tmp_path: Path
) -> None:
    mesh = ("--parallel.data=2",) if trains else ()
    watched.settings = (*watched.settings, *mesh, *(("--pods.trainer_count=2",) if trains else ("--pods.min_count=2",)))
    drivers = {name: NvidiaPrograms(tmp_path / "drivers" / name) for name in ("n2", "n3")}
    for name, driver in drivers.items():
        watched.pods[name] = PodRun(watched.folder / name, environment={"PATH": driver.path})
    controller, pods = begin(watched)
    failed, spare = failed_and_spare(watched)
    drivers[failed].log(f"[{boot_s():.6f}] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.")
    done = finish(controller)
    assert done.returncode == 0, done.stdout + done.stderr
    reason = "XID 79 of GPU 0000:18:00 (the GPU has fallen off the bus): GPU has fallen off the bus."
    assert node_events(watched.run)[2:] == [(failed, "cordoned"), (spare, "in use")]
    [unfit], [event] = watched.run.events("node_unfit"), watched.run.events("cordon")
    assert unfit.detail["node"] == failed and event.detail["reason"] == reason and f"node {failed} is not fit any more: {reason}" in done.stdout + done.stderr
    assert {node: (each.reason, each.by) for node, each in cluster_cordons(watched).items()} == {failed: (reason, watched.name)}
    assert difference(watched.run, undisturbed(watched, tmp_path, *mesh)) == []
    end_all(pods)
    assert watched.left_behind() == []


@needs_etcd
@pytest.mark.full
@pytest.mark.parametrize("flip", ["flip", "flips"])
def test_a_node_that_computes_other_bits_is_cordoned_and_a_spare_repeats_the_steps_since_the_last_agreement(
    flip: str, watched: Machines, tmp_path: Path
) -> None:
    # With three replicas the votes say who is wrong for good, with two who is wrong once.
    ranks = 3 if flip == "flips" else 2
    mesh = (f"--parallel.data={ranks}", "--checkpoint.every_steps=1", "--checkpoint.asynchronous=false", "--run.max_steps=8", "--evaluation.every_steps=8")
    names = [f"n{2 + number}" for number in range(ranks)]
    watched.settings = (*watched.settings, *mesh, f"--pods.max_count={ranks}", f"--pods.trainer_count={ranks}", "--trainer.corruption_check=1.0")
    # Whichever rank it gets, n2 is wrong. The spare comes when all others train.
    faults = ",".join(f"pod{rank}_trainer_rank{rank}:{flip}:gradient:3" for rank in (1, 2))
    pods = {name: watched.pod(name, *([f"--fault={faults}"] if name == "n2" else [])) for name in names[:-1]}
    controller = watched.train()
    wait_for_step(watched.run, 1)
    pods[names[-1]] = watched.pod(names[-1])
    done = finish(controller)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = watched.run.events("silent_corruption")
    [wrong] = found.detail["hosts"]
    assert wrong == "n2" and len(found.detail["ranks"]) == 1 and found.detail["step"] == 3 and found.detail["last_agreement"] == 2
    assert found.detail["checkpoint"] == 2 and found.detail["suspect_checkpoints"] == [3] and found.detail["is_persistent"] == (flip == "flips")
    assert {node: each.by for node, each in cluster_cordons(watched).items()} == {wrong: watched.name}
    assert f"spares take the places of {wrong}, which is cordoned" in done.stdout + done.stderr
    states = dict(node_events(watched.run))
    assert states.pop(wrong) == "cordoned" and set(states.values()) == {"in use"}, states
    alone = PodRun(tmp_path / "alone")
    assert alone.train(*STEPS, *mesh).returncode == 0
    assert difference(watched.run, alone) == []
    end_all(pods)
    assert watched.left_behind() == []
