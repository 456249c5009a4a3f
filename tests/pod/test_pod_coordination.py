"""A run whose weights are published in real etcd: the curve of the embedded store, with etcd, the controller or a second controller going wrong."""

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, free_ports, program
from pod_runs import PodRun, difference, finish

from tandem.pod.leadership import leading
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Fenced
from tandem.runtime.records.journal import Journal
from tandem.types import RunError, UserError

pytestmark = pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Of a run, whose name is its own in an etcd that tests share."""
    folder = tmp_path / f"run-{time.time_ns()}"
    folder.mkdir()
    return folder


def on(server: EtcdServer, *settings: str) -> list[str]:
    return ["--coordination", "etcd", f"--coordination.endpoints=[{server.url}]", *settings]


def store_of(server: EtcdServer, folder: Path) -> EtcdStore:
    return EtcdStore(server.config(), f"/tandem/{folder.name}/")


def test_a_controller_leads_alone_and_leaves_nothing(etcd_server: EtcdServer, run_folder: Path) -> None:
    config, store = etcd_server.config(lease_s=2.0), store_of(etcd_server, run_folder)
    with Journal(run_folder / "journal.sqlite") as journal:
        with leading(config, run_folder, journal, print) as fence:
            token = fence()
            assert token is not None and store.get("leader").revision == token.revision == fence().revision
            revision = store.compare_and_swap("weights/current", None, b"1", guard=token)
            # As after a pause of this process that was longer than its lease.
            store.revoke(json.loads(store.get("leader").value)["lease"])
            with pytest.raises(Fenced):
                store.compare_and_swap("weights/current", revision, b"2", guard=token)
            store.compare_and_swap("weights/current", revision, b"3", guard=fence())
        assert store.list("") == []


def test_another_runs_controller_is_refused_and_a_dead_ones_claim_ends_at_once(etcd_server: EtcdServer, run_folder: Path, tmp_path: Path) -> None:
    config, store, told = etcd_server.config(lease_s=2.0), store_of(etcd_server, run_folder), list[str]()
    with Journal(run_folder / "journal.sqlite") as journal, Journal(tmp_path / "other.sqlite") as others:
        with leading(config, run_folder, journal, told.append):
            claim = json.loads(store.get("leader").value)
            with pytest.raises(UserError, match=rf"those of another run, which process \d+ on .* leads with .*{run_folder.name}; choose another run\.name"):
                leading(config, run_folder, others, told.append).__enter__()
        # One in this folder and on this machine is dead, because this process holds the run's lock.
        lease = store.grant_lease(600)
        store.put("leader", json.dumps({**claim, "lease": lease}).encode(), lease)
        store.put("weights/current", b"of the dead")
        with leading(config, run_folder, journal, told.append) as fence:
            assert fence() is not None and [entry.key for entry in store.list("")] == ["leader"]


@pytest.mark.full
def test_a_controller_elsewhere_that_renews_its_lease_is_waited_for_and_then_named(etcd_server: EtcdServer, run_folder: Path) -> None:
    config, store, told = etcd_server.config(lease_s=2.0), store_of(etcd_server, run_folder), list[str]()
    with Journal(run_folder / "journal.sqlite") as journal:
        with leading(config, run_folder, journal, told.append):
            claim = json.loads(store.get("leader").value)
        with Session(store, 2) as session:
            store.put("leader", json.dumps({**claim, "host": "elsewhere", "pid": 7}).encode(), session.lease)
            with pytest.raises(UserError, match=rf"another controller leads run '{run_folder.name}' in etcd: process 7 on elsewhere, with .*; end it"):
                leading(config, run_folder, journal, told.append).__enter__()
        assert told == ["waiting for the lease of the controller on elsewhere (process 7), up to 2 s"]
        with leading(config, run_folder, journal, told.append) as fence:
            assert fence() is not None


def test_another_cluster_than_the_runs_is_refused_unless_it_is_named(etcd_server: EtcdServer, run_folder: Path) -> None:
    config = etcd_server.config()
    with Journal(run_folder / "journal.sqlite") as journal:
        with leading(config, run_folder, journal, print):
            saved = journal.get("coordination")
        journal.set("coordination", {**saved, "cluster": "abc"})
        line = rf"is cluster {saved['cluster']}, and the run began in cluster abc, .* resume with --coordination\.cluster_id={saved['cluster']}"
        with pytest.raises(UserError, match=line):
            leading(config, run_folder, journal, print).__enter__()
        with leading(replace(config, cluster_id=saved["cluster"]), run_folder, journal, print):
            assert journal.get("coordination") == saved


@pytest.mark.full
def test_an_etcd_that_does_not_answer_stops_a_run_before_it_has_a_folder(tmp_path: Path) -> None:
    run, url = PodRun(tmp_path / "runs"), f"http://127.0.0.1:{free_ports(1)[0]}"
    done = run.train("--coordination", "etcd", f"--coordination.endpoints=[{url}]", "--coordination.deadline_s=0.5")
    assert done.returncode == 1 and not run.directory.exists()
    (line,) = done.stderr.strip().splitlines()
    assert f"etcd at {url} did not answer within 0.5 s" in line and "coordination.endpoints" in line


@pytest.mark.full
def test_a_run_over_etcd_is_bit_for_bit_that_of_the_embedded_store(etcd_server: EtcdServer, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "run", name=f"run-{time.time_ns()}")
    done = run.train(*on(etcd_server))
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == []
    assert not (run.directory / "pod" / "store.sqlite").exists() and store_of(etcd_server, run.directory).list("") == []
    assert run.left_behind() == []


@pytest.mark.full
def test_etcd_killed_in_the_middle_of_a_run_loses_nothing(own_server: EtcdServer, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "run")
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", "--run.name=run", *on(own_server, "--coordination.lease_s=2"))
    store = store_of(own_server, run.directory)
    for _ in range(2):
        before = entry.revision if (entry := store.get("weights/current")) is not None else 0
        store.watch("weights/current", before, 120)
        own_server.kill()
        time.sleep(8)  # Longer than the lease, which etcd counts from its start anew, and long enough to be shown.
        own_server.start()
    done = finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.events("recovery") == []
    assert f"waits for etcd at {own_server.url}" in done.stdout and "going on" in done.stdout


@pytest.mark.full
def test_an_etcd_that_stays_away_ends_the_run_and_a_resume_goes_on(own_server: EtcdServer, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "run")
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", "--run.name=run", *on(own_server, "--coordination.deadline_s=2"))
    store_of(own_server, run.directory).watch("weights/current", 0, 120)
    own_server.kill()
    done = finish(process)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "did not answer within 2 s" in done.stderr.strip().splitlines()[-1] and run.left_behind() == []
    own_server.start()
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == []


@pytest.mark.full
def test_a_killed_controller_is_resumed_at_once_and_a_living_ones_run_is_refused(etcd_server: EtcdServer, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path / "run", name=f"run-{time.time_ns()}")
    settings = on(etcd_server, "--coordination.lease_s=600")
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", f"--run.name={run.name}", *settings)
    store = store_of(etcd_server, run.directory)
    store.watch("weights/current", 0, 120)
    second = PodRun(tmp_path / "second", name=run.name)
    refused = second.train(*settings)
    assert refused.returncode == 2 and "are those of another run" in refused.stderr.strip().splitlines()[-1]
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert store.get("leader") is not None
    # Its lease of ten minutes is ended by the resume, in the same folder on the same machine.
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and store.list("") == []


def test_the_error_of_a_deposed_controllers_trainer_is_one_line(etcd_server: EtcdServer, run_folder: Path) -> None:
    from tandem.runtime.coordination.store import Guard
    from tandem.types import WeightManifest, WeightVersion
    from tandem.weight_transfer.publication import publish

    store = store_of(etcd_server, run_folder)
    token = store.put("leader", b"another")
    with pytest.raises(RunError, match=r"weights of step 3 \(incarnation 1\) were not published: their controller leads the run no more"):
        publish(store, WeightManifest(WeightVersion(1, 3), (), ""), guard=Guard("leader", token - 1))
    assert store.get("weights/current") is None
