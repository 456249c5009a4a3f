"""Two runs in one etcd, at the same time, with pods of the same name: what happens to one changes nothing of the other."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from joined_machines import Machines, needs_etcd
from pod_runs import difference, finish, trained

from tandem.runtime.coordination.cordons import cluster_prefix
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.membership import ENDED

OTHER = ("--run.seed=7",)


@pytest.fixture
def both(tmp_path: Path, etcd_server: EtcdServer) -> Iterator[tuple[Machines, Machines]]:
    """Each with a folder, a secret and a pod ``a`` of its own; the second has another seed."""
    folders = (tmp_path / "first", tmp_path / "second")
    for folder in folders:
        folder.mkdir()
    made = Machines(folders[0], etcd_server), Machines(folders[1], etcd_server, OTHER)
    yield made
    for each in made:
        each.close()


@pytest.mark.full
@needs_etcd
def test_a_run_whose_pod_and_then_controller_are_killed_touches_nothing_of_the_run_beside_it(both: tuple[Machines, Machines], tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone"), trained(tmp_path / "other", *OTHER)
    first, second = both
    pods = [each.pod("a") for each in both]
    runs = [each.train("--pods.min_count=2") for each in both]
    first.wait_for("a", "weights of step 1 ", runs[0])
    os.killpg(pods[0].pid, signal.SIGKILL)
    pods[0].communicate()
    os.killpg(runs[0].pid, signal.SIGKILL)
    runs[0].communicate()
    done = finish(runs[1])
    assert done.returncode == 0 and difference(second.run, alone[1]) == [], done.stdout + done.stderr
    assert finish(pods[1]).returncode == 0 and second.members() == [("joined", "a")] and second.run.events("recovery") == []
    assert second.left_behind() == []
    # The first one goes on, with a pod of the same name again.
    pod = first.pod("a")
    again = first.run.resume()
    assert again.returncode == 0 and difference(first.run, alone[0]) == [], again.stdout + again.stderr
    assert finish(pod).returncode == 0 and first.left_behind() == []
    for each in both:
        with contextlib.closing(EtcdStore(each.etcd.config(), f"/tandem/{each.name}/")) as store:
            assert [entry.key for entry in store.list("")] == [ENDED]
    with contextlib.closing(EtcdStore(first.etcd.config(), cluster_prefix(first.etcd.config()))) as store:
        assert store.list("") == [], "no cordon of the cluster"
