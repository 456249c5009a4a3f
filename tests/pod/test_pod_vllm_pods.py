"""Several pods whose samples vLLM draws: weights sent on from pod to pod as changed elements, a pod that dies, and pods that were started elsewhere."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, program
from joined_machines import Machines
from pod_runs import HERE, PodRun, finish

sys.path.append(str(HERE.parent / "backends"))

from real_vllm import needs_vllm
from test_pod_vllm import VLLM, assert_whole

from tandem.runtime.records.journal import Journal

pytestmark = [pytest.mark.full, needs_vllm]
STEPS = 6


def test_three_pods_send_changed_elements_on_to_each_other_and_a_pod_that_dies_comes_back(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    bf16 = ("--trainer.dtype=bfloat16", "--trainer.learning_rate=1e-5")
    deltas = ("--pods.peer_to_peer=true", "--pods.elementwise_deltas=true", "--pods.full_update_every=4")
    done = run.train(*VLLM, "--pods", "3", *bf16, *deltas, "--fault", "pod1_rollout_shim:after:receive_weights:3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.left_behind() == []
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS)) and all(row["mismatch_kl"] < 1e-2 for row in rows)
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        for step in range(STEPS):
            samples = journal.samples(step)
            assert samples is not None and len({sample.id for sample in samples}) == len(samples) == 16
            assert {version.step for sample in samples for version in sample.sampled_weight_versions} == {step}
    logs = [(run.directory / "pods" / number / "logs" / "rollout_shim.log").read_text() for number in "12"]
    came = [re.findall(r"weights of step (\d) \(incarnation 1\) came from pod (\w+)", log) for log in logs]
    trainer = came[0][0][1]
    assert {int(step) for step, _ in came[1]} == set(range(STEPS + 1)), "the third pod has every version"
    assert len([pod for _, pod in came[1] if pod != trainer]) >= STEPS - 1, "from the second pod, but where that died"
    sent = re.findall(r"of the (\d+) bytes of weights of step (\d) \(incarnation 1\) (\d+) came whole, and (\d+) of a delta", logs[1])
    kinds = {int(step): (int(whole) * 2 > int(size), int(delta) > 0) for size, step, whole, delta in sent}
    assert kinds[0] == kinds[4] == (True, False) and kinds[1] == kinds[5] == (False, True)
    # Each pod has a server of its own.
    assert all((run.directory / folder / "logs" / "vllm.log").exists() for folder in ("", "pods/1", "pods/2"))


@pytest.fixture
def machines(etcd_server: EtcdServer, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, etcd_server, ("--rollout.backend=vllm", "--model.create.head_dim=32"))
    yield made
    made.close()


@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_a_pod_that_was_started_elsewhere_draws_with_a_vllm_of_its_own(machines: Machines) -> None:
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2")
    done = finish(train)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = finish(pod)
    assert ended.returncode == 0 and "pod a draws samples as pod 1" in ended.stdout and "pod a ends: the run has ended" in ended.stdout, ended
    assert machines.left_behind() == [] and machines.members() == [("joined", "a")] and machines.run.events("recovery") == []
    assert_whole(machines.run, STEPS)
    assert [f"weights of step {step} (incarnation 1) came from pod" in machines.log("a") for step in range(STEPS + 1)] == [True] * (STEPS + 1)
    log = (machines.pods["a"].parent / "files" / "logs" / "vllm.log").read_text()
    assert "POST /inference/v1/generate" in log or "Successfully reset prefix cache" in log
