"""Pods that are started elsewhere join a run, leave it, are fenced when they were cut off, and change no bit of it."""

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from etcd_server import EtcdServer
from joined_machines import CREDENTIAL, Machines, needs_etcd, shim_of
from pod_runs import RECIPE, PodRun, difference, finish

from tandem import __version__
from tandem.config.cluster import ClusterConfig
from tandem.config.pods import PodsConfig
from tandem.config.recipe import Recipe, load_config
from tandem.jobs.start import train
from tandem.layout.shard_offsets import whole_offsets
from tandem.pod.joining import Joining
from tandem.pod.joining_shim import AGAIN, STACKS_FOLDER, JoiningShim
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.start import open_channels
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.leased_key import LeasedKey
from tandem.runtime.coordination.membership import ENDED, join, leave, members
from tandem.runtime.coordination.session import Session
from tandem.runtime.health.node_report import own_versions
from tandem.runtime.process.stacks import stacks_in
from tandem.runtime.rpc.calls import PeerDied
from tandem.runtime.rpc.credentials import write_credential
from tandem.runtime.rpc.http_server import HttpServer
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import UserError, WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.transport.service import WeightService

JOINS = ["--pods.max_count=2", "--pods.credential_file=f", "--coordination.store=etcd", "--run.name=r"]


# -- one life of a pod -----------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """A life of the pod ``n`` in this process, whose end is only noted."""

    shim: JoiningShim
    ends: list[tuple[int, str]] = field(default_factory=list)

    def token(self, leader: int = 7) -> list[int]:
        assert self.shim.member is not None
        return [leader, self.shim.member.revision]

    def call(self, name: str, token: list[int], **meta: Any) -> dict[str, Any]:
        return self.shim.methods()[name]({**meta, "token": token}, {}, lambda _: None)[0]

    def set_up(self, token: list[int], more: str = "") -> None:
        self.call("setup", token, config=RECIPE.read_text() + more, number=1, deadline_s=60.0)


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    write_credential(tmp_path / "credential", CREDENTIAL)
    options = argparse.Namespace(
        health="{}",
        run=str(tmp_path), of_run="r", member="n", agent="a", join=str(tmp_path / "store.sqlite"), host="127.0.0.1", credential=str(tmp_path / "credential"),
        port=0, threads=1, lease=60.0, join_timeout=60.0, faults="", tls=None, trains=1, keeper=-1, keeps=0, again=False,
    )  # fmt: skip
    made = Life(JoiningShim(options))
    monkeypatch.setattr(made.shim, "end", lambda status, why: made.ends.append((status, why)))
    made.shim.join(1234)
    yield made
    made.shim.ended.set()
    made.shim.close()
    made.shim.store.close()


def test_a_life_answers_the_controller_that_set_it_up_and_no_other(life: Life) -> None:
    with pytest.raises(PeerDied, match=r"was fenced: a call has token \[7, \d+\], and this life None"):
        life.call("memory", life.token())
    with pytest.raises(PeerDied, match="pod n has another life now"):
        life.set_up([7, life.token()[1] - 1])
    life.set_up(life.token())
    assert life.call("memory", life.token()) == {"rss_bytes": 0, "shm_bytes": 0}
    with pytest.raises(PeerDied, match="pod n was set up before"):
        life.set_up(life.token())
    with pytest.raises(PeerDied, match=r"was fenced: a call has token \[6, \d+\], and this life \[7"):
        life.call("memory", life.token(6))
    assert life.ends == []


@pytest.mark.parametrize(
    ("more", "prepared"), [("", ["rollout"]), ("\npods: {count: 2, trainer_count: 2}\nparallel: {data: 2}\n", ["rollout", "trainer"])], ids=["alone", "two"]
)
def test_a_life_prepares_ranks_of_the_trainer_only_where_several_pods_train(more: str, prepared: list[str], life: Life, tmp_path: Path) -> None:
    life.set_up(life.token(), more)
    assert sorted(file.name.partition("_")[0] for file in (tmp_path / "logs").glob("*-forks.out")) == prepared


def test_a_life_tells_its_controller_alone_where_its_processes_are(life: Life, tmp_path: Path) -> None:
    life.set_up(life.token())
    with stacks_in(tmp_path / STACKS_FOLDER):
        (stack,) = life.call("stacks", life.token())["stacks"].items()
        with pytest.raises(PeerDied, match="was fenced"):
            life.call("stacks", life.token(6))
    assert stack[0] == f"the rollout shim (process {os.getpid()})" and "in stacks_of" in stack[1] and "in named_stacks" in stack[1]


def test_a_life_reads_weights_while_they_are_registered_for_its_controller_alone(life: Life, tmp_path: Path) -> None:
    life.set_up(life.token())
    asked = {"store": "the run's", "own_store": "its own", "version": [1, 1], "protocols": [], "deadline_s": 60.0}
    with pytest.raises(PeerDied, match="was fenced"):
        life.call("receive_early", life.token(6), **asked)
    store, buffers = EmbeddedStore(tmp_path / "store.sqlite"), WeightBuffers.create("test" + secrets.token_hex(4), 1 << 20)
    service = WeightService("first", buffers.segments, store, CREDENTIAL, ("tcp",))
    assert life.call("receive_early", life.token(), **asked) == {}
    mirror = life.shim.shims["rollout"].between_pods._mirror

    def read(number: int) -> torch.Tensor:
        ends = time.monotonic() + 30
        while number == 2 and mirror is not None and mirror._early is not None and mirror._early._done_bytes() == 0 and time.monotonic() < ends:
            time.sleep(0.005)
        return torch.full((100, 100), float(number))

    shards = [WeightShard(f"t{i}", (100, 100), whole_offsets((100, 100)), torch.float32, lambda i=i: read(i)) for i in range(3)]
    writer = WeightWriter(buffers, store, 1)
    manifest = writer.publish(place_shards(alone().world, shards), WeightVersion(1, 1), announces=True)
    got = life.call("receive_weights", life.token(), **asked)
    assert got["bytes"] == manifest.size_bytes and got["early_bytes"] > 0 and got["rereads"] == []
    own = current(EmbeddedStore(tmp_path / "pod" / "store.sqlite"))
    assert own is not None and own[0].digest == manifest.digest
    for each in (service, writer, buffers, store):
        each.close()


def test_a_new_controller_ends_a_life_that_works_for_the_one_before(life: Life) -> None:
    life.set_up(life.token(7))
    with pytest.raises(PeerDied, match="pod n was set up before"):
        life.set_up(life.token(6))
    with pytest.raises(PeerDied, match="works for an earlier controller; it joins again"):
        life.set_up(life.token(8))
    ends = time.monotonic() + 30
    while not life.ends and time.monotonic() < ends:
        time.sleep(0.01)
    assert life.ends == [(AGAIN, "another controller leads the run")]


def test_a_pod_whose_lease_is_over_keeps_a_result_that_is_late_and_what_it_has_drawn(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.set_up(life.token())
    assert life.shim.session is not None
    told: list[dict[str, Any]] = []

    def draw(meta: Any, blobs: Any, progress: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], dict[str, bytes]]:
        progress({"samples": "in time"})
        # The process was stopped for longer than its lease; no thread has looked at the clock since.
        monkeypatch.setattr("tandem.runtime.coordination.session._now_s", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + 61)
        with contextlib.suppress(PeerDied):
            progress({"samples": "late"})
        return {}, {}

    monkeypatch.setattr(life.shim.shims["rollout"], "methods", lambda: {"rollout": draw})
    with pytest.raises(PeerDied, match="the lease of pod n is over"):
        life.shim.methods()["rollout"]({"token": life.token()}, {}, told.append)
    assert told == [{"samples": "in time"}]
    # A minute later the pod has seen it itself.
    ends = time.monotonic() + 30
    while not life.ends and time.monotonic() < ends:
        time.sleep(0.01)
    assert (AGAIN, "its lease in the store is over, so the run goes on without it") in life.ends


def test_a_pod_ends_its_process_when_the_run_has_dropped_it(life: Life) -> None:
    leave(life.shim.store, "n")
    ends = time.monotonic() + 30
    while not life.ends and time.monotonic() < ends:
        time.sleep(0.01)
    assert life.ends[0] == (AGAIN, "the run has dropped it")


def test_the_next_life_of_a_pod_takes_the_place_of_the_one_before_and_another_pod_of_this_name_does_not(life: Life) -> None:
    before = life.shim.member
    assert before is not None
    again = JoiningShim(argparse.Namespace(**{**vars(life.shim.options), "port": 0}))
    again.end = lambda status, why: None  # type: ignore[method-assign]
    again.join(4321)
    assert again.member is not None and again.member.revision > before.revision
    other = JoiningShim(argparse.Namespace(**{**vars(life.shim.options), "agent": "b"}))
    with pytest.raises(UserError, match=r"the run has a member 'n' already \(.*\); give this one another name, or end that one \(--name\)"):
        other.join(1)
    for shim in (again, other):
        shim.ended.set()
        shim.close()


def test_a_key_is_written_again_after_its_lease_has_ended(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store.sqlite")
    key = LeasedKey(store, "weights/endpoints/p", b"here", 0.3)
    entry = store.get("weights/endpoints/p")
    assert entry is not None
    store.revoke(key._session.lease)
    assert store.get("weights/endpoints/p") is None
    assert store.watch("weights/endpoints/p", entry.revision, 30).value == b"here"
    key.close()
    assert store.get("weights/endpoints/p") is None
    store.close()


# -- the controller's side -------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A controller that looks for pods, of which ``most`` may take part, and the ``calls`` that they received."""

    store: EmbeddedStore
    joining: Joining
    folder: Path
    calls: list[tuple[str, str]] = field(default_factory=list)
    servers: list[HttpServer] = field(default_factory=list)

    def add(
        self, name: str, credential: str = CREDENTIAL, *, refuses: str = "", version: str = __version__, ahead_s: float = 0.0, torch: str | None = None
    ) -> Session:
        """Adds a pod that answers every call but ``refuses``, whose clock is ``ahead_s``, and which has another ``torch``."""

        def answer(call: str) -> Any:
            def method(meta: Any, blobs: Any, progress: Any) -> Any:
                self.calls.append((name, call))
                if call == refuses:
                    raise UserError("/dev/shm is too small")
                if call == "describe":
                    return {"time_s": time.time() + ahead_s, "machine": "m1", "versions": own_versions() | ({} if torch is None else {"torch": torch})}, {}
                return {"left": False}, {}

            return method

        methods = {call: answer(call) for call in ("describe", "setup", "receive_model", "start_worker", "start_engine", "release")}
        server = HttpServer(methods, credential, name=name)
        server.start()
        self.servers.append(server)
        session = Session(self.store, 60)
        join(session, name, {"host": "127.0.0.1", "port": server.port, "agent": name, "version": version})
        return session

    def look(self) -> list[RolloutPod]:
        """Returns the pods that became ready."""
        self.joining.look(self.store, members(self.store), {"folder": str(self.folder)})
        ends = time.monotonic() + 30
        while len(self.joining.news) < 1 and time.monotonic() < ends:
            with self.joining.changed:
                self.joining.changed.wait(0.1)
        return self.joining.ready()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(9))
    made = Run(EmbeddedStore(tmp_path / "store.sqlite"), Joining("{}", CREDENTIAL, 1, 1, 1, lambda: 7, 60.0, 5.0), tmp_path / "model")
    yield made
    for server in made.servers:
        server.close()


def test_a_pod_that_joined_is_prepared_and_one_more_than_may_waits_for_its_place(run: Run) -> None:
    first = run.add("first")
    (pod,) = run.look()
    assert (pod.number, pod.name) == (1, "first") and run.joining.told() == [{"joined": 1, "name": "first"}]
    assert [call for _, call in run.calls] == ["setup", "receive_model", "start_worker", "start_engine"]
    second = run.add("second")
    run.joining.look(run.store, members(run.store), {"folder": str(run.folder)})
    assert list(run.joining.lives) == ["first"]
    run.joining.forget(pod, "left")
    assert run.joining.told() == [{"left": 1, "name": "first", "reason": ""}]
    # The life that left is not taken again, although its key is still there.
    (other,) = run.look()
    assert (other.number, other.name) == (2, "second")
    for session in (first, second):
        session.close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"credential": "00" * 32}, r"refused the call 'setup': 401 wrong credential"), ({"refuses": "start_engine"}, "/dev/shm is too small"),
        ({"version": "0.0.1"}, f"it has Tandem 0.0.1 and the run {__version__}; install the same version"),
    ],
    ids=["credential", "memory", "version"],
)  # fmt: skip
def test_a_pod_that_cannot_be_prepared_is_said_once_and_tried_again_in_its_next_life(wrong: dict[str, str], reason: str, run: Run) -> None:
    session = run.add("first", **wrong)
    assert run.look() == []
    (news,) = run.joining.told()
    assert news["refused"] == 1 and reason in news["reason"] and run.joining.lives == {}
    run.joining.look(run.store, members(run.store), {"folder": str(run.folder)})
    assert run.joining.lives == {}, "this life is over"
    session.close()
    run.add("first")
    (pod,) = run.look()
    assert pod.number == 1 and run.joining.told() == [{"joined": 1, "name": "first"}]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"ahead_s": 61.5}, r"the clock of node first \(m1\) is 6[0-3]\.\d s ahead of that of the controller, more than cluster\.max_clock_offset_s \(1\); "),
        ({"ahead_s": -7.5}, r"the clock of node first \(m1\) is [6-9]\.\d s behind that of the controller, more than"),
        ({"torch": "1.0"}, r"node first \(m1\) has torch 1\.0 and the controller has .*; install the same version on all nodes$"),
    ],
    ids=["ahead", "behind", "torch"],
)  # fmt: skip
def test_a_pod_with_another_clock_or_version_is_refused_before_it_is_set_up_unless_machines_are_not_compared(
    wrong: dict[str, Any], reason: str, run: Run
) -> None:
    run.joining.nodes.preflight = ClusterConfig()
    session = run.add("first", **wrong)
    assert run.look() == [] and {call for _, call in run.calls} <= {"describe", "release"}
    (news,) = run.joining.told()
    assert re.match(reason, news["reason"]) and "\n" not in news["reason"]
    assert run.joining.why_few() == f"; pod first could not join the run: {news['reason']}"
    session.close()
    run.joining.nodes.preflight = None
    session = run.add("first", **wrong)
    (pod,) = run.look()
    assert pod.number == 1 and run.joining.why_few() == ""
    session.close()


def test_a_pod_that_answers_late_is_asked_again_until_its_clock_is_known_well_and_then_takes_part(run: Run) -> None:
    run.joining.nodes.preflight = ClusterConfig(max_clock_offset_s=0.25)
    session = run.add("first", ahead_s=0.1)
    prompt, answers = run.servers[0].methods["describe"], iter((0.15, 0.15, 0.0))

    def late(meta: Any, blobs: Any, progress: Any) -> Any:
        answer = prompt(meta, blobs, progress)
        time.sleep(next(answers))
        return answer

    run.servers[0].methods["describe"] = late  # type: ignore[index]
    assert [pod.name for pod in run.look()] == ["first"] and list(answers) == []
    session.close()


def test_a_pod_that_does_not_answer_keeps_no_stacks_from_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.pod.joining._STACKS_S", 0.3)
    run.joining.most = 2
    sessions = [run.add("silent"), run.add("fine")]
    ends = time.monotonic() + 30
    while len(run.joining.lives) < 2 or not all(pod.is_set_up for pod in run.joining.lives.values()):
        run.joining.look(run.store, members(run.store), {"folder": str(run.folder)})
        assert time.monotonic() < ends
    run.servers[0].methods["stacks"] = lambda meta, blobs, progress: threading.Event().wait(60)  # type: ignore[assignment, return-value]
    run.servers[1].methods["stacks"] = lambda meta, blobs, progress: ({"stacks": {"a worker": "its stack"}}, {})
    stacks = run.joining.stacks()
    assert stacks["fine, a worker"] == "its stack" and "is stuck in 'stacks': no result within 0.3 s" in stacks["silent, the pod"]
    for session in sessions:
        session.close()


# -- keys ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, line",
    [
        ({"min_count": 0}, r"'pods\.min_count' is 0; it must be at least 1"),
        ({"count": 3, "max_count": 2}, r"'pods\.max_count' is 2 and pods\.count 3, the pods that the run starts itself; raise max_count or leave it out"),
        ({"min_count": 2}, r"'pods\.min_count' is 2, which is not read: no pod can join, because pods\.max_count is 0 and pods\.count 1; set pods\.max_count"),
        ({"max_count": 2, "min_count": 3, "credential_file": "f"}, r"'pods\.min_count' is 3 and pods\.max_count 2"),
        ({"max_count": 2, "credential_file": "f", "port": 70000}, r"'pods\.port' is 70000; it must be a port"),
        ({"max_count": 2, "credential_file": "f", "host": "0.0.0.0"}, r"'pods\.host' is '0\.0\.0\.0', which no other machine can connect to"),
        ({"max_count": 2}, r"'pods\.credential_file' is not given; make the secret that they show: \(umask 077; openssl rand -hex 32 > pods\.secret\)"),
        ({"max_count": 2, "credential_file": "f", "heartbeat_timeout_s": 0.0}, r"'pods\.heartbeat_timeout_s' is 0\.0; it must be above 0 seconds"),
    ],
    ids=["least", "most", "unread", "more than most", "port", "host", "secret", "seconds"],
)
def test_keys_of_joining_that_cannot_be_right_are_refused_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        PodsConfig(**values).check()


@pytest.mark.parametrize(
    "overrides, line",
    [
        (JOINS[:2], r"so pods can join from other machines, which reach no 'embedded' store; set coordination\.store to etcd"),
        (JOINS[:3], r"which find a run by its name; set run\.name"),
    ],
    ids=["store", "name"],
)
def test_runs_that_no_pod_can_join_are_refused_in_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        load_config(RECIPE, overrides)


@pytest.mark.parametrize(
    "wrong, line",
    [
        (["--pods.host=nowhere.invalid"], "host 'nowhere.invalid' is not an address of this machine"),
        (["--pods.credential_file=missing"], "the pod's credential missing cannot be read"),
        (["--pods.tls_cert_file=no.crt", "--pods.tls_key_file=no.key", "--pods.tls_ca_file=no.crt"], r"the file 'no\.crt' \('pods\.tls_cert_file'\) cannot be"),
    ],
    ids=["host", "secret", "certificate"],
)
def test_an_address_or_a_file_that_is_not_there_is_refused_before_any_work(
    wrong: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(RECIPE.parent / "rewards.py", tmp_path)
    write_credential(tmp_path / "f", CREDENTIAL)
    recipe = load_config(RECIPE, [*JOINS, *wrong, f"--run.directory={tmp_path / 'runs'}"])
    assert isinstance(recipe, Recipe)
    with pytest.raises(UserError, match=line):
        open_channels(recipe, tmp_path, False, None)
    with pytest.raises(UserError, match=line):
        train(recipe, progress=False)
    assert not (tmp_path / "runs").exists()


# -- runs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machines(etcd_server: EtcdServer, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, etcd_server)
    yield made
    made.close()


@pytest.mark.full
@needs_etcd
def test_a_pod_that_was_started_elsewhere_draws_samples_and_the_curve_is_that_of_one_pod(machines: Machines, undisturbed: PodRun) -> None:
    # More than pods.count, which is 1.
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2")
    done = finish(train)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = finish(pod)
    assert ended.returncode == 0 and "pod a draws samples as pod 1" in ended.stdout and "pod a ends: the run has ended" in ended.stdout, ended
    assert difference(machines.run, undisturbed) == [] and machines.left_behind() == []
    assert machines.members() == [("joined", "a")] and machines.run.events("recovery") == []
    assert [f"weights of step {step} (incarnation 1) came from pod" in machines.log("a") for step in range(7)] == [True] * 7
    # It has begun with them while they were registered.
    assert "are read from pod" in machines.log("a") and "the weights of step 6 are read beside those in use" in machines.log("a", "rollout_worker")
    store = EtcdStore(machines.etcd.config(), f"/tandem/{machines.name}/")
    assert [entry.key for entry in store.list("")] == [ENDED], "neither keys of members nor of requests"


@pytest.mark.full
@needs_etcd
@pytest.mark.parametrize("is_away", [False, True], ids=["there", "away for a while"])
def test_of_two_pods_the_far_one_reads_its_weights_from_object_storage_and_no_bit_changes(is_away: bool, machines: Machines, tmp_path: Path) -> None:
    stored, bf16 = tmp_path / "stored", ("--trainer.dtype=bfloat16", "--trainer.learning_rate=1e-5")
    alone = PodRun(tmp_path / "alone", name=machines.name)
    done = alone.train(*bf16)
    assert done.returncode == 0, done.stdout + done.stderr
    machines.settings = ("--pods.elementwise_deltas=true", "--pods.full_update_every=3", f"--pods.weights_url={stored}")
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2", *bf16)
    if is_away:
        machines.wait_for("a", "weights of step 1 ", train)
        stored.rename(tmp_path / "elsewhere")
        stored.write_text("a file in the place of the folder")
        machines.wait_for("a", "are read from other pods", train)
        stored.unlink()
        (tmp_path / "elsewhere").rename(stored)
    done = finish(train)
    assert done.returncode == 0, done.stdout + done.stderr
    assert finish(pod).returncode == 0 and machines.members() == [("joined", "a")] and machines.run.events("recovery") == []
    assert difference(machines.run, alone) == [] and machines.left_behind() == []
    came = [re.search(rf"weights of step {step} \(incarnation 1\) came from '(.*)' over storage", machines.log("a")) for step in range(7)]
    assert all(came) or (is_away and came[0] and not all(came))
    if not is_away:
        assert sorted(path.name for path in stored.iterdir()) == kept_of(7, 3)


def kept_of(steps: int, full_every: int) -> list[str]:
    """Returns the names of the files that a run of so many versions leaves: from the last anchor but one on."""
    anchors = [step for step in range(steps) if step % full_every == 0]
    return [f"weights-000001-{step:010d}.{'anchor' if step in anchors else 'delta'}" for step in range(anchors[-2], steps)]


@pytest.mark.full
@needs_etcd
def test_pods_join_and_leave_between_iterations_and_that_costs_no_restart(machines: Machines, tmp_path: Path) -> None:
    longer = "--run.max_steps=60"
    alone = PodRun(tmp_path / "alone", name=machines.name)
    done = alone.train(longer)
    assert done.returncode == 0, done.stdout + done.stderr
    first, train = machines.pod("first"), machines.train("--pods.min_count=2", longer)
    machines.wait_for("first", "weights of step 1 ", train)
    first.terminate()
    second = machines.pod("second")
    assert finish(first).returncode == 0
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, alone) == [], done.stdout + done.stderr
    # min_count 2 makes the run wait for the second one when the first has left.
    assert machines.members() == [("joined", "first"), ("left", "first"), ("joined", "second")] and machines.run.events("recovery") == []
    assert "pod first ends: it has left" in machines.log("first") and finish(second).returncode == 0 and machines.left_behind() == []


@pytest.mark.full
@needs_etcd
def test_a_pod_that_was_stopped_for_longer_than_its_lease_answers_nothing_and_joins_anew(machines: Machines, undisturbed: PodRun) -> None:
    machines.settings = ("--pods.heartbeat_timeout_s=4",)
    pod = machines.pod("a", "--fault", "rollout_shim:stall:rollout:3")
    train = machines.train("--pods.min_count=2")
    marker, ends = machines.pods["a"].parent / "files" / "faults" / "rollout_shim-stall-rollout-3", time.monotonic() + 240
    while not marker.exists():
        assert time.monotonic() < ends and train.poll() is None
        time.sleep(0.02)
    shim = shim_of(machines.pods["a"])
    os.kill(shim, signal.SIGSTOP)
    # The run goes on without it: min_count is not met, so it waits for the pod's next life.
    time.sleep(8)
    os.kill(shim, signal.SIGCONT)
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    assert machines.members() == [("joined", "a"), ("joined", "a")]
    (event,) = machines.run.events("recovery")
    assert (event.detail["part"], event.detail["pod"]) == ("pod", 1)
    assert "its lease in the store is over" in machines.log("a") or "the run has dropped it" in machines.log("a")
    assert finish(pod).returncode == 0 and machines.left_behind() == []


@pytest.mark.full
@needs_etcd
@pytest.mark.parametrize("fault", ["rollout_shim:before:rollout:3", "rollout_shim:after:rollout:3", "rollout_shim:before:receive_weights:2"])
def test_a_pod_that_is_killed_joins_again_and_no_bit_changes(fault: str, machines: Machines, undisturbed: PodRun) -> None:
    pod, train = machines.pod("a", "--fault", fault), machines.train("--pods.min_count=2")
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    assert machines.members() == [("joined", "a"), ("joined", "a")] and len(machines.run.events("recovery")) == 1
    assert finish(pod).returncode == 0 and machines.left_behind() == []


@pytest.mark.full
@needs_etcd
def test_a_pod_whose_next_life_comes_after_the_end_of_the_run_ends_too(machines: Machines, undisturbed: PodRun) -> None:
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2")
    # The last ones, after which the run needs as many pods no longer.
    machines.wait_for("a", "weights of step 6 (incarnation 1) came", train)
    pod.send_signal(signal.SIGSTOP)
    os.kill(shim_of(machines.pods["a"]), signal.SIGKILL)
    done = finish(train)
    pod.send_signal(signal.SIGCONT)
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    ended = finish(pod)
    *_, joined, told = ended.stdout.splitlines()
    assert ended.returncode == 0 and "joined run" in joined and told == "pod a ends: the run has ended", ended
    assert machines.left_behind() == []


@pytest.mark.full
@needs_etcd
def test_pods_wait_for_a_controller_that_was_killed_and_work_for_the_next_one(machines: Machines, undisturbed: PodRun) -> None:
    pods = [machines.pod(name) for name in ("a", "b")]
    assert finish(machines.train("--pods.min_count=3", "--fault", "controller:after:commit_samples:3")).returncode != 0
    resumed = machines.run.resume()
    assert resumed.returncode == 0 and difference(machines.run, undisturbed) == [], resumed.stdout + resumed.stderr
    assert [finish(pod).returncode for pod in pods] == [0, 0] and machines.left_behind() == []
    assert all(machines.log(name).count("draws samples as pod") == 2 for name in ("a", "b"))


@pytest.mark.full
@needs_etcd
def test_a_pod_whose_agent_is_killed_leaves_nothing_behind(machines: Machines, undisturbed: PodRun) -> None:
    pod, train = machines.pod("a"), machines.train("--pods.min_count=2")
    machines.wait_for("a", "weights of step 1 ", train)
    pod.kill()
    pod.communicate()
    assert machines.pods["a"].left_behind() == []
    # Less than pods.min_count are left, so the run waits for another.
    again = machines.pod("b")
    done = finish(train)
    assert done.returncode == 0 and difference(machines.run, undisturbed) == [], done.stdout + done.stderr
    assert finish(again).returncode == 0 and machines.left_behind() == []


@pytest.mark.full
@needs_etcd
def test_what_keeps_a_pod_from_joining_is_one_line_and_leaves_nothing(machines: Machines) -> None:
    def refusal(*arguments: str) -> str:
        done = finish(machines.pod("a", *arguments))
        assert done.returncode in (1, 2) and len(done.stderr.splitlines()) == 1, done
        return done.stderr

    server = HttpServer({}, CREDENTIAL, name="other")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert f"port {server.port} on 127.0.0.1 cannot be taken" in refusal(f"--pods.port={server.port}")
    assert "no controller leads run" in finish(machines.pod("a", "--pods.join_timeout_s=0.5")).stdout
    (machines.folder / "secret").chmod(0o644)
    assert "make it readable by its owner only (chmod 600)" in refusal()
    assert machines.left_behind() == []
