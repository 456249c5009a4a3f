"""The trainer's ranks in several pods: the bits of as many ranks in one, whatever dies."""

import gc
import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import xxhash
import yaml
from damaged_memory import children, flip_pattern
from pod_runs import RECIPE, PodRun, difference, finish, trained
from trainer_pod_runs import BOTH_TRAIN, FEW_STEPS, train

from tandem.config.load import to_mapping
from tandem.config.recipe import Recipe, load_config
from tandem.jobs.checks.check_rl import check_rl_run
from tandem.jobs.pod_plan import plan_of
from tandem.layout.mesh import Mesh, MeshShape, crossing
from tandem.layout.placement import pods_of_ranks, ranks_of_pods
from tandem.layout.residents import KEEP
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.pod.channel import RemoteChannel
from tandem.pod.failures import SidecarDied
from tandem.pod.joined_trainers import JoinedTrainer, JoinedTrainers
from tandem.pod.joining import FOLDER_PROOF
from tandem.pod.joining_shim import has_proof
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.sidecars import TrainerSidecar
from tandem.pod.start import open_channels
from tandem.pod.trainer_pods import TrainerPod, TrainerPods
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.membership import join, leave
from tandem.runtime.coordination.session import Session
from tandem.runtime.process.worker_group import GroupSettings, RanksLost, Share, WorkerGroup
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.types import RunError, UserError, WeightVersion
from tandem.types.wire import Frame
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.publication import current

TWO_RANKS = (*FEW_STEPS, "--parallel.data=2")
BOTH_TRAIN_KEYS = ("--pods.count=2", "--pods.trainer_count=2")


@pytest.fixture(scope="module")
def one_pod(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """Two data-parallel ranks in one pod, without faults."""
    return trained(tmp_path_factory.mktemp("one-pod"), *TWO_RANKS)


# -- which ranks are where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "pods"), [(MeshShape(4), 2), (MeshShape(4, 2), 4), (MeshShape(2, 2, 2), 2), (MeshShape(4, 1, 3, 2, 4), 2)],
)  # fmt: skip
def test_each_pod_has_whole_replicas_of_the_model(shape: MeshShape, pods: int) -> None:
    shares = ranks_of_pods(shape, pods)
    assert sorted(rank for share in shares for rank in share) == list(range(shape.world)) and {len(share) for share in shares} == {shape.world // pods}
    assert 0 in shares[0]
    for share in shares:
        for rank in share:
            mesh = Mesh(shape, rank)
            # Nothing but the sums over data-parallel ranks goes from pod to pod.
            assert {*mesh.group("tensor"), *mesh.group("pipeline"), *mesh.group("context"), *mesh.group("expert")} <= {*share}


@pytest.mark.parametrize(
    ("shape", "pods"), [(MeshShape(pipeline=2), 2), (MeshShape(2, 1, 2), 4), (MeshShape(2, 2, 4, 2), 4), (MeshShape(3, 2, 6, 2, 2), 9)],
)  # fmt: skip
def test_pods_of_which_there_are_several_for_each_replica_have_neighbouring_stages_of_one(shape: MeshShape, pods: int) -> None:
    shares, each = ranks_of_pods(shape, pods), pods // shape.data
    stages = shape.pipeline // each
    # Ranks are numbered with tensor innermost, then context, data and pipeline.
    inner = shape.tensor * shape.context
    for pod, share in enumerate(shares):
        first = pod % each * stages
        assert share == tuple(
            (stage * shape.data + pod // each) * inner + rank for stage in range(first, first + stages) for rank in range(inner)
        )  # fmt: skip
    node_of = pods_of_ranks(shape, pods)
    assert {*crossing(shape, node_of)} <= {"data", "pipeline"}
    # The next stage is in the same pod or in the next one.
    for rank in range(shape.world):
        pipeline = [node_of[peer] for peer in Mesh(shape, rank).group("pipeline")]
        assert {after - before for before, after in itertools.pairwise(pipeline)} <= {0, 1}


@pytest.mark.parametrize(("shape", "pods"), [(MeshShape(4), 3), (MeshShape(pipeline=2), 4), (MeshShape(pipeline=3), 2), (MeshShape(2, 1, 2), 3)])
def test_pods_that_divide_neither_replicas_nor_stages_are_refused(shape: MeshShape, pods: int) -> None:
    with pytest.raises(ValueError, match=f"{pods} pods cannot divide {shape.data} data-parallel replicas of {shape.pipeline} stages"):
        ranks_of_pods(shape, pods)


# -- what fails ----------------------------------------------------------------------------------------------------------------


@dataclass
class FakeTrainer:
    """A trainer sidecar: answers from ``replies`` and raises what is in ``errors``, by the name of the call."""

    number: int
    errors: dict[str, Exception] = field(default_factory=dict)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def start_shim(self) -> None:
        self.asked.append(("start_shim", {}))

    def call(self, name: str, meta: Meta | None = None, blobs: Blobs | None = None, **_: Any) -> Frame:
        self.asked.append((name, dict(meta or {})))
        if name in self.errors:
            raise self.errors[name]
        return Frame(self.replies.get(name, {"digest": "d0", "rendezvous": "10.0.0.1:4711"}), {})

    def allocate(self, size_bytes: int) -> tuple[str, ...]:
        return f"first of {self.number}", f"second of {self.number}"

    def discard(self) -> None:
        self.asked.append(("discard", {}))


@pytest.fixture
def two() -> TrainerPods:
    pods = [TrainerPod(n, FakeTrainer(n), (n,), f"10.0.0.{n + 1}", f"store of {n}" if n else "") for n in range(2)]  # type: ignore[arg-type]
    made = TrainerPods(pods, Path("/run"), 1, [(0,), (1,)])
    made.start()
    return made


def fake(pods: TrainerPods, number: int) -> FakeTrainer:
    channel = pods.pods[number].channel
    assert isinstance(channel, FakeTrainer)
    return channel


def test_the_pod_of_rank_0_says_where_the_ranks_of_the_others_find_it(two: TrainerPods) -> None:
    wanted = {"directory": "/run", "threads": 1}
    assert fake(two, 0).asked[1] == ("start_ranks", {**wanted, "ranks": (0,), "host": "10.0.0.1", "rendezvous": ""})
    assert fake(two, 1).asked[1] == ("start_ranks", {**wanted, "ranks": (1,), "host": "10.0.0.2", "rendezvous": "10.0.0.1:4711"})
    two.start()
    assert [name for name, _ in fake(two, 1).asked].count("start_ranks") == 1


def test_each_pod_publishes_in_its_own_memory_and_store_and_only_the_first_under_the_guard_and_announced(two: TrainerPods) -> None:
    names = two.allocate(1)
    two.call("register", {"version": [1, 0], "buffers": list(names), "guard": ["leader", 7], "announces": True})
    first, second = (fake(two, number).asked[-1][1] for number in (0, 1))
    assert first == {"version": [1, 0], "buffers": ["first of 0", "second of 0"], "guard": ["leader", 7], "announces": True}
    assert second == {"version": [1, 0], "buffers": ["first of 1", "second of 1"], "guard": None, "store": "store of 1", "announces": False}
    two.call("serve_weights", {})
    assert [name for name, _ in fake(two, 1).asked].count("serve_weights") == 0


def test_the_rank_that_died_is_named_beside_the_one_that_missed_it_and_all_are_replaced(two: TrainerPods) -> None:
    fake(two, 0).errors["train"] = SidecarDied("trainer", "worker", "rank 0 of 2 ('tokens'): the collective failed")
    fake(two, 1).errors["train"] = SidecarDied("trainer", "worker", "rank 1 died (killed by SIGKILL)")
    with pytest.raises(SidecarDied, match=r"trainer worker died: pod 0: rank 0 .*; pod 1: rank 1 died \(killed by SIGKILL\)$"):
        two.call("train", {"step": 0})
    two.discard()
    two.start()
    for number in range(2):
        assert [name for name, _ in fake(two, number).asked][-2:] == ["start_shim", "start_ranks"]


def test_what_is_wrong_with_a_run_is_not_taken_for_a_death(two: TrainerPods) -> None:
    fake(two, 0).errors["save"] = SidecarDied("trainer", "worker", "rank 0 missed rank 1")
    fake(two, 1).errors["save"] = RunError("the disk is full")
    with pytest.raises(RunError, match="the disk is full"):
        two.call("save")


def test_replicas_that_have_become_different_are_found_before_an_engine_has_their_weights(two: TrainerPods) -> None:
    two.allocate(1)
    fake(two, 1).replies["register"] = {"digest": "d1"}
    with pytest.raises(SidecarDied, match="the weights of pod 1 have digest d1 and those of pod 0 d0, after the same steps"):
        two.call("register", {"version": [1, 3]})


# -- ranks in pods that joined -------------------------------------------------------------------------------------------------


@dataclass
class FakeJoining:
    """Pods that joined: ``there`` are able to train."""

    there: list[RolloutPod]
    others: list[RolloutPod] = field(default_factory=list)
    folder: str = "/runs/r"
    forgotten: list[str] = field(default_factory=list)

    def why_few(self) -> str:
        return ""

    @property
    def lives(self) -> dict[str, RolloutPod]:
        return {pod.name: pod for pod in (*self.there, *self.others)}

    def able_to_train(self, store: Any, present: Any) -> list[RolloutPod]:
        return [pod for pod in self.there if pod.name in {member.name for member in present}]

    def forget(self, pod: RolloutPod, what: str, reason: str = "") -> None:
        self.forgotten.append(pod.name)


@dataclass
class FakeJoinedChannel:
    answers: bool = True
    is_running: bool = True

    def call(self, name: str, *_: Any, **__: Any) -> Frame:
        if not self.answers:
            raise SidecarDied("rollout", "shim", "no sign of life for 4 s")
        return Frame({}, {})

    def kill(self) -> None:
        self.is_running = False


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[tuple[JoinedTrainers, FakeJoining, EmbeddedStore]]:
    """Two of the pods p1, p2 and p3, which are members, are to train."""
    store = EmbeddedStore(tmp_path / "store.sqlite")
    session = Session(store, 60)
    pods = []
    for number in (1, 2, 3):
        join(session, f"p{number}", {"host": f"10.0.0.{number}"})
        pods.append(RolloutPod(number, FakeJoinedChannel(), 1, "own", name=f"p{number}", is_set_up=True, reaches_folder=True))  # type: ignore[arg-type]
    joining = FakeJoining(pods)
    yield JoinedTrainers(2, 1, joining, lambda: EmbeddedStore(tmp_path / "store.sqlite"), 0.2), joining, store  # type: ignore[arg-type]
    session.close()
    store.close()


def test_the_pods_that_joined_first_train_and_another_takes_the_place_of_one_that_is_lost(
    joined: tuple[JoinedTrainers, FakeJoining, EmbeddedStore],
) -> None:
    trainers, joining, store = joined
    assert [(pod.name, host) for pod, host in trainers.choose()] == [("p1", "10.0.0.1"), ("p2", "10.0.0.2")]
    # Their ranks publish the weights, which the third one receives.
    assert [pod.receives for pod in joining.there] == [False, False, True]
    leave(store, "p1")
    assert [pod.name for pod, _ in trainers.choose()] == ["p2", "p3"]
    assert [pod.receives for pod in joining.there] == [True, False, False]
    trainers.close()


def test_too_few_pods_that_can_train_are_one_line_that_names_those_without_the_folder_of_the_run(
    joined: tuple[JoinedTrainers, FakeJoining, EmbeddedStore],
) -> None:
    trainers, joining, _ = joined
    joining.others = [joining.there.pop(), joining.there.pop()]
    for pod in joining.others:
        pod.reaches_folder = False
    line = r"^2 of pods\.trainer_count 3 pods .* after .* \(0\.2 s\): p3 does not have the run's folder '/runs/r' under this path; p2"
    with pytest.raises(RunError, match=line):
        trainers.choose()
    trainers.close()


def test_a_pod_whose_ranks_cannot_be_stopped_is_left_out_and_one_that_answers_is_not(joined: tuple[JoinedTrainers, FakeJoining, EmbeddedStore]) -> None:
    _, joining, _ = joined
    silent, answers = joining.there[:2]
    assert isinstance(silent.channel, FakeJoinedChannel)
    silent.channel.answers = False
    for pod in (silent, answers):
        JoinedTrainer(pod, joining).discard()  # type: ignore[arg-type]
    assert joining.forgotten == ["p1"] and [pod.channel.is_running for pod in (silent, answers)] == [False, True]
    with pytest.raises(SidecarDied, match="trainer shim died: p1: no sign of life for 4 s"):
        JoinedTrainer(silent, joining).call("train")  # type: ignore[arg-type]


def test_a_pod_reaches_the_folder_of_a_run_by_what_the_run_wrote_there(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / FOLDER_PROOF).write_text("ab12")
    assert has_proof(str(tmp_path), "ab12")
    assert not has_proof(str(tmp_path), "other") and not has_proof(str(tmp_path / "elsewhere"), "ab12") and not has_proof("", "")


TINY = ModelShapes("qwen3", 16, 32, 2, 2, 1, 16, 64, 48, True)


def test_this_machine_is_planned_for_its_own_ranks() -> None:
    joins = ["--coordination.store=etcd", "--run.name=r", "--pods.credential_file=f", "--pods.max_count=4", "--parallel.data=4"]
    plans = {}
    for trainers in (1, 2, 4):
        recipe = load_config(str(RECIPE), [*joins, f"--pods.trainer_count={trainers}"])
        assert isinstance(recipe, Recipe) and recipe.ranks_here == 4 // trainers
        plans[trainers] = plan_of(recipe, TINY, 48).host
    assert plans[1].trainer == 2 * plans[2].trainer == 4 * plans[4].trainer and plans[1].segments == plans[4].segments


def test_a_dry_run_says_which_pod_has_which_ranks(tmp_path: Path) -> None:
    mesh = ("--parallel.data=2", "--parallel.pipeline=2", "--model.create.tie_word_embeddings=false")
    recipe = load_config(str(RECIPE), [*BOTH_TRAIN_KEYS, *mesh, f"--run.directory={tmp_path}", "--rewards.functions=[{function: task}]"])
    assert isinstance(recipe, Recipe)
    assert check_rl_run(recipe).lines()[:4] == [
        "mesh: 4 ranks = pipeline 2 x data 2 x context 1 x tensor 1", "  trainer pod 0: ranks 0, 2", "  trainer pod 1: ranks 1, 3",
        "  across trainer pods: data",
    ]  # fmt: skip
    kept = replace(recipe, checkpoint=replace(recipe.checkpoint, memory_every_steps=1))
    assert [line for line in check_rl_run(kept).lines() if line.startswith("predicted checkpoints in memory: 2")], "a keeper has at least 24 MiB"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["--pods.trainer_count=2"], "'pods.trainer_count' is 2 and pods.count 1; lower it, or raise pods.count"),
        (["--pods.count=2", "--pods.trainer_count=2"], r"'pods.trainer_count' is 2, which does not divide parallel.data 1: .* set parallel.data to a multiple"),
        (["--pods.count=2", "--pods.trainer_count=0"], "'pods.trainer_count' is 0"),
        (["--pods.count=2", "--pods.trainer_count=2", "--parallel.data=2", "--parallel.zero=3"], "with parallel.zero 3, .* set parallel.zero to 2 or less"),
        (["--pods.count=2", "--pods.trainer_count=2", "--parallel.data=2", "--parallel.ranks_per_node=1"], "leave ranks_per_node out"),
        (["--pods.count=2", "--pods.trainer_count=2", "--parallel.data=2", "--trainer.backend=deepspeed"], "trainer.backend deepspeed, whose ranks are in one"),
        (["--pods.count=2", "--pods.trainer_count=2", "--parallel.data=2", "--parallel.expert=2"], "would not have all experts"),
    ],
)  # fmt: skip
def test_trainer_pods_that_cannot_be_are_refused_in_one_line(settings: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        load_config("sort", settings)
    assert "\n" not in str(refused.value)


@pytest.mark.full
def test_ranks_whose_meeting_place_goes_away_are_lost_and_the_run_is_not_wrong(tmp_path: Path) -> None:
    """As where rank 0 is killed while the others look for it: the trainer is replaced, and the run goes on."""
    place: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    share = Share((1,), "127.0.0.1", f"127.0.0.1:{place.port}")
    (tmp_path / "logs").mkdir()
    settings = GroupSettings("the trainer worker", "tandem.pod.trainer_worker", tmp_path, tmp_path / "group", 1, share=share)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_mapping(load_config(str(RECIPE), ["--parallel.data=2"]))))
    with closing(WorkerGroup(settings, MeshShape(2))) as group, ThreadPoolExecutor(1) as pool:
        call = pool.submit(group.call, "load", {}, deadline_s=120.0)
        ends = time.monotonic() + 100
        # The rank has said where it is, and waits for rank 0 to do so.
        while place.num_keys() < 2 and time.monotonic() < ends:
            time.sleep(0.05)
        del place
        gc.collect()
        with pytest.raises(RanksLost, match="rank 1 of 2 did not find the others"):
            call.result()


# -- two trainer sidecars ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sidecars(tmp_path: Path) -> Iterator[tuple[TrainerSidecar, TrainerPods, Path]]:
    """The trainer of two pods, with a rank each, and the folder of the model that it has made."""
    # Weights that are copied are published in rows, as the model's files have them.
    recipe = load_config(str(RECIPE), [*BOTH_TRAIN_KEYS, "--parallel.data=2", "--rollout.weights=copied"])
    assert isinstance(recipe, Recipe)
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_mapping(recipe)))
    channel, _ = open_channels(recipe, tmp_path, inline=False, faults=None)
    assert isinstance(channel, TrainerPods)
    channel.start()
    trainer = TrainerSidecar(channel)
    trainer.create_model(tmp_path / "model")
    yield trainer, channel, tmp_path / "model"
    channel.close()


def test_each_of_two_pods_holds_the_whole_model_in_its_own_memory_and_a_bit_that_flips_in_one_is_found_before_an_engine_has_it(
    sidecars: tuple[TrainerSidecar, TrainerPods, Path],
) -> None:
    trainer, pods, model = sidecars
    wanted = {name: xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes()) for name, tensor in read_tensors(model)}

    def publish(incarnation: int) -> None:
        trainer.load(model, None, KEEP, ())
        buffers = trainer.channel.allocate(segment_bytes(read_shapes(model), "float32"))
        trainer.convert(0)
        trainer.register(WeightVersion(incarnation, 0), buffers)
        segments = set()
        for store in (model.parent / "pod" / "store.sqlite", model.parent / "pods" / "1" / "pod" / "store.sqlite"):
            with closing(EmbeddedStore(store)) as opened:
                published = current(opened)
            assert published is not None
            manifest, _ = published
            assert manifest.version == WeightVersion(incarnation, 0)
            assert {entry.name: [part.digest for part in entry.parts] for entry in manifest.tensors} == {name: [digest] for name, digest in wanted.items()}
            segments |= {entry.segment for entry in manifest.tensors}
        assert len(segments) == 2

    publish(1)
    channel = pods.pods[1].channel
    assert isinstance(channel, RemoteChannel) and channel.shim is not None
    (rank,) = [pid for pid in children(str(channel.shim.pid)) if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    embedding = dict(read_tensors(model))["model.embed_tokens.weight"].numpy().tobytes()
    assert flip_pattern(rank, embedding[256:352])
    with pytest.raises(SidecarDied, match=r"the weights of pod 1 have digest \w+ and those of pod 0 \w+, after the same steps"):
        trainer.register(WeightVersion(2, 0), trainer.channel.allocate(1))
    trainer.channel.discard()
    trainer.channel.start()
    publish(3)
    (rank,) = [pid for pid in children(str(channel.shim.pid)) if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(rank), signal.SIGKILL)
    with pytest.raises(SidecarDied, match=r"pod 1: .*died.*SIGKILL"):
        trainer.convert(0)


# -- whole runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_two_trainer_pods_have_the_bits_of_two_ranks_in_one_although_a_rank_is_killed(one_pod: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, *TWO_RANKS, "--fault", "pod1_trainer_rank1:before:train:2")
    assert difference(run, one_pod) == []
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in run.rows()] == [(0.0, 0.0)] * 3
    (lost,) = run.events("recovery")
    assert lost.detail["role"] == "trainer" and "pod 1: rank 1 died (killed by SIGKILL)" in lost.detail["reason"]
    # The second pod's engines took their weights from its own memory.
    assert "receives" not in (run.directory / "pods" / "1" / "logs" / "rollout_shim.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "trainer_worker:after:register:1", "pod1_trainer_rank1:after:checkpoint_stage:2", "pod1_trainer_shim:before:train:1", "trainer_shim:after:train:1",
        "pod1_rollout_worker:before:update_weight:1", "pod1_rollout_shim:before:rollout:2",
    ],
)  # fmt: skip
def test_whatever_is_killed_with_two_trainer_pods_changes_no_bit(fault: str, one_pod: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, *TWO_RANKS, "--fault", fault)
    assert len([*run.directory.glob("faults/*"), *run.directory.glob("pods/1/faults/*")]) == 1
    assert difference(run, one_pod) == [] and len(run.events("recovery")) == 1


@pytest.mark.full
@pytest.mark.parametrize("settings", [(), ("--pods.count=1", "--pods.trainer_count=1")])
def test_a_killed_run_of_two_trainer_pods_is_resumed_with_the_same_bits_also_in_one_pod(settings: tuple[str, ...], one_pod: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*BOTH_TRAIN, *TWO_RANKS, "--fault", "pod:after:train:2")
    assert done.returncode == -9, done.stdout + done.stderr
    assert run.left_behind() == []
    done = run.resume(*settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, one_pod) == [] and run.left_behind() == []


@pytest.mark.full
def test_a_run_of_two_trainer_pods_is_verified_and_a_step_of_it_replayed(one_pod: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, *TWO_RANKS)
    for command in (["verify", str(run.directory)], ["replay", str(run.directory), "--step", "1"]):
        done = finish(run.begin(*command))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_a_third_pod_that_only_draws_receives_the_weights(one_pod: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--pods", "3", "--trainer-pods", "2", *TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, one_pod) == [] and run.left_behind() == []
