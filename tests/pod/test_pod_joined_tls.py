"""Runs whose pods are on other machines, encrypted: the bits of one pod, and no place in the run for a machine with another certificate, or none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificate
from etcd_server import EtcdServer
from joined_machines import Machines, needs_etcd
from pod_runs import PodRun, difference, finish

pytestmark = [pytest.mark.full, needs_etcd]


@pytest.fixture
def machines(etcd_server: EtcdServer, tmp_path: Path) -> Iterator[Machines]:
    authority, other = certificate(tmp_path, "authority"), certificate(tmp_path, "other")
    for name, signer in (("run", authority), ("a", authority), ("b", authority), ("stranger", other)):
        certificate(tmp_path, name, signer)
    made = Machines(tmp_path, etcd_server)
    yield made
    made.close()


def tls(machines: Machines, name: str, authority: str = "authority") -> list[str]:
    files = {"cert": f"{name}.crt", "key": f"{name}.key", "ca": f"{authority}.crt"}
    return [f"--pods.tls_{what}_file={machines.folder / file}" for what, file in files.items()]


def test_an_encrypted_run_of_three_pods_has_the_bits_of_one_pod(machines: Machines, tmp_path: Path) -> None:
    bf16 = ("--trainer.dtype=bfloat16", "--trainer.learning_rate=1e-5")
    alone = PodRun(tmp_path / "alone", name=machines.name)
    assert alone.train(*bf16).returncode == 0
    # Weights, deltas and what pods send on to each other; and a pod of the run's own, which reads them over TLS too.
    machines.settings = (*bf16, "--pods.peer_to_peer=true", "--pods.elementwise_deltas=true", "--pods.full_update_every=4", "--pods.max_count=4")
    pods = [machines.pod(name, *tls(machines, name)) for name in ("a", "b")]
    done = finish(machines.train("--pods.min_count=4", "--pods.count=2", "--rollout.prompts_per_step=4", *tls(machines, "run")))
    assert done.returncode == 0 and difference(machines.run, alone) == [], done.stdout + done.stderr
    assert [finish(pod).returncode for pod in pods] == [0, 0] and machines.left_behind() == []
    assert sorted(machines.members()) == [("joined", "a"), ("joined", "b")] and machines.run.events("recovery") == []


def test_machines_with_another_certificate_or_none_take_no_part(machines: Machines, undisturbed: PodRun) -> None:
    pods = [machines.pod("a", *tls(machines, "stranger", "other")), machines.pod("b")]
    done = finish(machines.train(*tls(machines, "run"), "--run.max_steps=6"))
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    refused = {event.detail["name"]: event.detail["reason"] for event in machines.run.events("membership")}
    assert "its certificate is not that of a pod" in refused["a"]
    assert "the run has pods.tls_cert_file and it has not; give all machines of the run certificates, or none" in refused["b"]
    for pod in pods:
        pod.terminate()
        finish(pod)
    assert machines.left_behind() == []


def test_certificates_that_cannot_be_used_are_one_line_before_any_work(machines: Machines) -> None:
    certificate(machines.folder, "expired", days=(-3, -1))
    for process in (machines.pod("a", *tls(machines, "expired")), machines.train(*tls(machines, "expired"))):
        done = finish(process)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done
        assert "expired.crt' ('pods.tls_cert_file') has expired; renew it, or correct the clock of this machine" in done.stderr
    assert machines.left_behind() == [] and not machines.run.directory.exists()
