"""Several pods draw the samples of a run: the bits of one pod, whatever dies, is silent or leaves."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, program
from fake_workers import PROMPTS, FakeWorker, roll_out
from pod_runs import RECIPE, PodRun, difference, finish, recipe_with, train_two_pods

from tandem.config.pods import PodsConfig
from tandem.config.recipe import Recipe, load_config
from tandem.jobs.checks.check_rl import check_rl_run
from tandem.pod.failures import PodLost, SidecarDied
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.rollout_pods import RolloutPods
from tandem.pod.rollout_workers import RolloutWorkers
from tandem.pod.start import open_channels
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.membership import Member, join, leave, members
from tandem.runtime.coordination.session import Session
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.types import UserError
from tandem.types.wire import Frame
from tandem.weight_transfer import elementwise


def test_groups_of_a_lost_pod_are_drawn_once_each_by_the_workers_of_the_others() -> None:
    lost = PodLost(1, "rollout", "pod 1 was killed")
    ended: list[PodLost] = []
    here, there, beside = FakeWorker(), FakeWorker(dies_at=2, death=lost), FakeWorker(dies_at=1, death=lost)

    def replace(number: int) -> FakeWorker:
        raise AssertionError(f"worker {number} of a lost pod was replaced in the rollout")

    drawn, progress, _ = roll_out(RolloutWorkers([here, there, beside], replace, 256, 9.0, ended.append))
    assert sorted(each.id for each in drawn) == sorted(f"0/{prompt.id}/{i}" for prompt in PROMPTS for i in range(2))
    (left_out,) = [each for each in progress if "left_out" in each]
    # One restart pays for the whole pod, which is ended once.
    assert (left_out["left_out"], left_out["reason"]) == (1, "pod 1 was killed") and ended == [lost]
    assert max(each.get("done", 0) for each in progress) == 7


def test_the_loss_of_the_last_pod_ends_the_rollout_and_so_does_one_beyond_the_allowed_restarts() -> None:
    def workers() -> RolloutWorkers:
        return RolloutWorkers([FakeWorker(dies_at=1, death=PodLost(n, "rollout", f"pod {n} was killed")) for n in range(2)], lambda n: FakeWorker(), 256, 9.0)

    for restarts_left in (2, 1):
        with pytest.raises(PodLost, match=r"pod \d was killed"):
            roll_out(workers(), restarts_left)


def test_a_pod_that_is_lost_while_its_worker_is_replaced_is_left_out() -> None:
    def replace(number: int) -> FakeWorker:
        raise PodLost(0, "replace_worker", "pod 0 was killed")

    drawn, progress, _ = roll_out(RolloutWorkers([FakeWorker(dies_at=1), FakeWorker()], replace, 256, 9.0))
    assert len(drawn) == 14 and [each["left_out"] for each in progress if "left_out" in each] == [0]


@dataclass
class FakeChannel:
    """A pod's sidecar: joins the run when it starts, unless it is ``broken``. ``asked``: every call of all pods, in order."""

    number: int
    store: EmbeddedStore
    asked: list[tuple[int, str]]
    broken: bool = False
    session: Session | None = None

    @property
    def member(self) -> str:
        return f"pod-{self.number}"

    @property
    def is_running(self) -> bool:
        return self.session is not None

    def start(self) -> None:
        if self.broken:
            raise SidecarDied("rollout", "shim", "it did not start")
        if self.session is None:
            self.session = Session(self.store, 60)
            join(self.session, self.member, {})

    def kill(self) -> None:
        """As ``kill -9``: its lease lasts on."""
        self.session = None

    def call(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, **_: Any) -> Frame:
        self.asked.append((self.number, name))
        return Frame({"kv_cache_bytes": 1, "base_bytes": 0, "version": list((meta or {}).get("version", ())), "rereads": [], "seconds": 0.0}, {})


@dataclass
class ThreeFakePods:
    store: EmbeddedStore
    asked: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channels = [FakeChannel(number, self.store, self.asked) for number in range(3)]
        made = [RolloutPod(channel.number, channel, 1, "" if channel.number == 0 else "own") for channel in self.channels]  # type: ignore[arg-type]
        self.pods = RolloutPods(made, lambda: self.store, "shared", 256, 9.0, LearnedDeadline(10, 30, 600))

    def update(self) -> list[int]:
        """Returns the pods that were newly left out."""
        self.asked.clear()
        return [each["left_out"] for each in self.pods.call("update_weight", {"version": [1, 2]}).meta.get("left_out", [])]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ThreeFakePods]:
    made = ThreeFakePods(EmbeddedStore(tmp_path / "store.sqlite"))
    made.pods.start()
    made.pods.call("start_engine", {"folder": "f"})
    yield made
    for channel in made.channels:
        if channel.session is not None:
            channel.session.close()
    made.store.close()


def test_every_other_pod_has_received_the_weights_before_any_engine_switches(three: ThreeFakePods) -> None:
    assert three.update() == []
    assert sorted(three.asked[:2]) == [(1, "receive_weights"), (2, "receive_weights")]
    assert sorted(three.asked[2:]) == [(0, "update_weight"), (1, "update_weight"), (2, "update_weight")]


def test_engines_of_a_pod_that_has_the_weights_read_them_while_others_receive_and_switch_together(three: ThreeFakePods) -> None:
    three.pods.stages = lambda pod: True
    assert three.update() == []
    *before, first, second, third = three.asked
    assert sorted(before) == [(0, "stage_weight"), (1, "receive_weights"), (1, "stage_weight"), (2, "receive_weights"), (2, "stage_weight")]
    assert all(before.index((number, "receive_weights")) < before.index((number, "stage_weight")) for number in (1, 2))
    assert sorted((first, second, third)) == [(0, "update_weight"), (1, "update_weight"), (2, "update_weight")]


def test_every_pod_without_ranks_of_the_trainer_is_told_of_a_version_before_it_is_registered(three: ThreeFakePods) -> None:
    def told(asked: int) -> list[tuple[int, str]]:
        three.asked.clear()
        assert three.pods.call("receive_early", {"version": [1, 2]}).meta == {"pods": asked}
        ends = time.monotonic() + 10
        while len(three.asked) < asked and time.monotonic() < ends:
            time.sleep(0.005)
        return sorted(three.asked)

    assert told(2) == [(1, "receive_early"), (2, "receive_early")]
    three.pods.sends_on = {"host": "127.0.0.1"}
    assert told(1) == [(1, "receive_early")], "the others read from it"
    three.pods.reads_early = lambda pod: pod.number == 2
    assert told(0) == [], "the first one does not"
    three.pods.sends_on = {}
    assert told(1) == [(2, "receive_early")]
    three.pods.reads_deltas = True
    assert told(0) == []


def test_pods_of_other_machines_read_early_by_themselves_and_those_of_this_one_when_they_are_asked_to(tmp_path: Path) -> None:
    def early(*settings: str) -> list[bool]:
        recipe = load_config(RECIPE, ["--pods.count=2", *settings])
        assert isinstance(recipe, Recipe)
        pods = open_channels(recipe, tmp_path, False, None)[1]
        assert isinstance(pods, RolloutPods)
        joined = RolloutPod(7, None, 1, "its own", name="elsewhere")  # type: ignore[arg-type]
        return [each(pod) for pod in (pods.pods[1], joined) for each in (pods.reads_early, pods.stages)]

    assert early() == [False, False, True, False] and early("--pods.pipeline=always") == [True, True, True, True]


def test_a_pod_whose_lease_ended_is_started_again_before_the_update(three: ThreeFakePods) -> None:
    leave(three.store, "pod-2")
    before = {member.name: member.revision for member in members(three.store)}
    assert three.update() == [2]
    assert three.asked[0] == (2, "start_engine") and (2, "update_weight") in three.asked
    (again,) = [member for member in members(three.store) if member.name == "pod-2"]
    assert isinstance(again, Member) and again.revision > max(before.values())


def test_a_pod_that_does_not_start_again_is_said_once_and_takes_part_when_it_does(three: ThreeFakePods) -> None:
    leave(three.store, "pod-1")
    three.channels[1].broken = True
    assert three.update() == [1] and {number for number, _ in three.asked} == {0, 2}
    assert three.update() == [] and {number for number, _ in three.asked} == {0, 2}
    three.channels[1].broken = False
    assert three.update() == [] and (1, "update_weight") in three.asked
    leave(three.store, "pod-1")
    assert three.update() == [1], "it is lost anew"


def test_where_no_pod_is_left_the_one_sidecar_of_the_cycle_died(three: ThreeFakePods) -> None:
    for channel in three.channels:
        leave(three.store, channel.member)
        channel.broken = True
    with pytest.raises(SidecarDied, match=r"no pod is left: pod 0 did not renew its lease.*pod 2"):
        three.update()


def test_a_count_that_cannot_be_right_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"'pods\.count' is 0; it must be at least 1"):
        PodsConfig(count=0).check()


@pytest.mark.parametrize(
    ("pods", "refusal"),
    [
        (PodsConfig(count=2, elementwise_deltas=True, full_update_every=0), r"'pods\.full_update_every' is 0; it must be at least 1"),
        (PodsConfig(count=2, full_update_every=5), r"'pods\.full_update_every' is 5, which is not read: pods\.elementwise_deltas is false"),
        (PodsConfig(elementwise_deltas=True), r"'pods\.elementwise_deltas' is true, which is not read: the run has one pod"),
        (PodsConfig(weights_url="stored"), r"'pods\.weights_url' is 'stored', which is not read: pods\.elementwise_deltas is false; set"),
        (PodsConfig(elementwise_deltas=True, weights_url="stored", peer_to_peer=True), r"'pods\.peer_to_peer' is true, which is not read: the run has one pod"),
        (PodsConfig(elementwise_deltas=True, weights_url="s3://key:secret@b/c"), r"'pods\.weights_url' has a password or a signature in its address"),
        (PodsConfig(count=2, elementwise_deltas=True, protocols=("rdma",)), r"pods\.protocols is \[rdma\]; deltas are sent over plain TCP: add tcp"),
    ],
)
def test_deltas_that_could_not_be_sent_are_refused_in_one_line(pods: PodsConfig, refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        pods.check()


def test_a_storage_with_the_weights_of_another_run_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = ["--pods.count=2", "--pods.elementwise_deltas=true", f"--pods.weights_url={tmp_path / 'stored'}", f"--run.directory={tmp_path / 'runs'}"]
    recipe = load_config(RECIPE, settings)
    assert isinstance(recipe, Recipe)
    monkeypatch.chdir(RECIPE.parent)
    check_rl_run(recipe)
    (tmp_path / "stored" / "weights-000001-0000000006.anchor").write_bytes(b"of a run")
    with pytest.raises(UserError, match=r"'pods\.weights_url' is '.*stored', which has the weights of another run \('weights-000001-0000000006\.anchor'\)"):
        check_rl_run(recipe)


def test_deltas_without_numpy_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(elementwise, "is_available", lambda: False)
    recipe = load_config(RECIPE, ["--pods.count=2", "--pods.elementwise_deltas=true", f"--run.directory={tmp_path}"])
    assert isinstance(recipe, Recipe)
    monkeypatch.chdir(RECIPE.parent)
    with pytest.raises(UserError, match=r"'pods\.elementwise_deltas' is true and needs numpy, which is not installed; pip install 'tandem-rl\[deltas\]'"):
        check_rl_run(recipe)


def test_pods_without_work_without_cpus_or_inline_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'pods\.count' is 3 with rollout\.workers 2 each, and rollout\.prompts_per_step is 4;.* 2 would have nothing to do"):
        load_config(RECIPE, ["--pods.count=3", "--rollout.workers=2"])
    with pytest.raises(UserError, match=r"'pods\.count' is 2 with machine\.device cuda; the pods of one machine compute on its CPUs"):
        load_config(RECIPE, ["--pods.count=2", "--machine.device=cuda"])
    recipe = load_config(RECIPE, ["--pods.count=2"])
    assert isinstance(recipe, Recipe)
    with pytest.raises(UserError, match=r"--inline is one process and this run has 2 pods; leave --inline out or set pods\.count to 1"):
        open_channels(recipe, tmp_path, True, None)


@pytest.mark.full
def test_two_pods_give_the_bits_of_one(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--pods", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    # The second pod has received every version; with half of the groups each, both pods were busy.
    received = (run.directory / "pods" / "1" / "logs" / "rollout_shim.log").read_text()
    assert [f"weights of step {step} (incarnation 1) came from pod" in received for step in range(7)] == [True] * 7
    assert run.events("recovery") == []
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert all(row["perf/rollout_groups/pod-0"] + row["perf/rollout_groups/pod-1"] == 4 for row in rows)


@pytest.mark.full
@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_two_pods_over_etcd_of_which_one_is_killed_give_the_bits_of_one(etcd_server: EtcdServer, undisturbed: PodRun, tmp_path: Path) -> None:
    from tandem.runtime.coordination.etcd import EtcdStore

    run = PodRun(tmp_path / "run", name=f"run-{time.time_ns()}")
    settings = ["--coordination", "etcd", f"--coordination.endpoints=[{etcd_server.url}]"]
    train_two_pods(run, *settings, "--fault", "pod1_rollout_shim:after:rollout:3")
    assert difference(run, undisturbed) == []
    assert EtcdStore(etcd_server.config(), f"/tandem/{run.name}/").list("") == []


@pytest.mark.full
def test_a_run_of_two_pods_is_resumed_with_three_of_two_workers_and_replayed(undisturbed: PodRun, tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, rollout={"prompts_per_step": 6, "max_tokens": 12})
    alone, run = PodRun(tmp_path / "alone", recipe), PodRun(tmp_path / "run", recipe)
    done = alone.train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.train("--pods", "2", "--fault", "pod:after:commit_samples:3").returncode != 0
    done = run.resume("--pods.count=3", "--rollout.workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, alone) == [] and run.left_behind() == []
    replayed = finish(run.begin("replay", str(run.directory), "--step", "4"))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.full
def test_a_second_pod_in_bf16_is_sent_changed_elements_alone_and_whole_weights_every_few_steps_and_no_bit_changes(tmp_path: Path) -> None:
    bf16 = ("--trainer.dtype=bfloat16", "--trainer.learning_rate=1e-5")
    alone, run = PodRun(tmp_path / "alone"), PodRun(tmp_path / "run")
    done = alone.train(*bf16)
    assert done.returncode == 0, done.stdout + done.stderr
    # The first life of the second pod ends after it has received two versions: the next one has no base.
    train_two_pods(run, *bf16, "--pods.elementwise_deltas=true", "--pods.full_update_every=4", "--fault", "pod1_rollout_shim:after:receive_weights:3")
    assert difference(run, alone) == []
    # Engines of both pods compute with what is in the shared memory of their pod, where the delta was applied.
    for folder in (run.directory, run.directory / "pods" / "1"):
        assert "computes with the published weights in shared memory" in (folder / "logs" / "rollout_worker.log").read_text()
    log = (run.directory / "pods" / "1" / "logs" / "rollout_shim.log").read_text()
    came = {
        int(step): (int(whole) * 2 > int(size), int(delta) > 0)
        for size, step, whole, delta in re.findall(r"of the (\d+) bytes of weights of step (\d) \(incarnation 1\) (\d+) came whole, and (\d+) of a delta", log)
    }
    assert came[0] == (True, False) and came[1] == (False, True) and came[4] == (True, False) and came[5] == (False, True)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["", "pod1_rollout_shim:after:receive_weights:2"])
def test_of_three_pods_the_last_receives_every_version_from_the_second(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--pods", "3", "--pods.peer_to_peer=true", *(["--fault", fault] if fault else []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    logs = [(run.directory / "pods" / number / "logs" / "rollout_shim.log").read_text() for number in "12"]
    came = [re.findall(r"weights of step (\d) \(incarnation 1\) came from pod (\w+)", log) for log in logs]
    trainer = came[0][0][1]
    from_the_trainer = [int(step) for step, pod in came[1] if pod == trainer]
    # Where the second pod died, the third may have had its weights before it said that it has them.
    assert {int(step) for step, _ in came[1]} == set(range(7)) and from_the_trainer in ([], [2] if fault else [])
