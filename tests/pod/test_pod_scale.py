"""The controller of very many pods: simulated ones, with real leases, keys and heartbeats in a real etcd. ``benchmarks/controller_scale.py`` has 1,000."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program
from simulated_run import simulate

from tandem.pod.failures import PodLost, SidecarDied
from tandem.pod.joined_channel import JoinedChannel
from tandem.pod.member_watch import MemberWatch
from tandem.pod.rollout_pod import RolloutPod
from tandem.pod.rollout_pods import RolloutPods
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.membership import find_member, join, leave, members
from tandem.runtime.coordination.session import Session
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply
from tandem.runtime.rpc.http_client import HttpClient
from tandem.runtime.rpc.http_server import HttpServer
from tandem.types import RunError

TOKEN = "c0" * 32


@pytest.mark.full
@pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)
def test_a_controller_of_a_hundred_pods_misses_no_death_and_needs_less_than_a_core(tmp_path: Path) -> None:
    lease_s = 10.0
    outcome = simulate(tmp_path, 100, 2, lease_s, 110.0, 10)
    assert len(outcome.deaths) == 10 and len(outcome.steps) >= 2
    assert [death for death in outcome.deaths if death.detected_s is None or death.detected_s > 2 * lease_s] == []
    assert outcome.false_alarms == []
    assert outcome.cpu_share < 1.0 and outcome.scrapes_ms


class Machine:
    """A pod that joined as ``name``, which answers as long as it is neither ``dead`` nor cut off."""

    def __init__(self, name: str, number: int, store: EmbeddedStore, lease_s: float = 60.0) -> None:
        self.dead, self.session = threading.Event(), Session(store, lease_s)
        self.server = HttpServer({"memory": self._memory, "rollout": self._rollout, "update_weight": self._update}, TOKEN, name=name)
        self.server.start()
        self.member = join(self.session, name, {"agent": "a"})
        client = HttpClient(f"pod {number} ({name})", self.server.port, TOKEN, heartbeat_timeout_s=60.0)
        self.channel = JoinedChannel(name, self.member.revision, [1, self.member.revision], client, 60.0)
        self.pod = RolloutPod(number, self.channel, 2, own_store="own", name=name, revision=self.member.revision)

    def _memory(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        if self.dead.is_set():
            raise RunError("it is dead")
        return {"rss_bytes": 0, "shm_bytes": 0}, {}

    def _rollout(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        time.sleep(60)
        return {}, {}

    def _update(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        if self.dead.is_set() and meta["worker"]:
            raise RunError("it is dead")
        return {"version": meta["version"], "rereads": [], "kv_cache_bytes": 1, "base_bytes": 0, "seconds": 0.0}, {}

    def close(self) -> None:
        self.server.close()
        self.session.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_pod_whose_lease_ends_is_lost_and_its_call_ends_at_once_and_one_that_leaves_is_not(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store.sqlite")
    dying, leaving = Machine("dying", 1, store), Machine("leaving", 2, store)
    lost, ended = list[str](), list[Exception]()
    watch = MemberWatch(lambda: EmbeddedStore(tmp_path / "store.sqlite"), lambda: [dying.pod, leaving.pod], lambda pod: lost.append(pod.name))

    def draw() -> None:
        try:
            dying.pod.ask("rollout", deadline_s=50.0)
        except PodLost as death:
            ended.append(death)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    wait_until(lambda: bool(dying.channel.client._open))
    time.sleep(0.3)  # The watch has seen both.
    leave(store, "leaving")
    dying.dead.set()
    store.revoke(dying.session.lease)
    wait_until(lambda: lost == ["dying"] and bool(ended))
    assert "its lease is over and it does not answer" in str(ended[0])
    with pytest.raises(SidecarDied, match="was left out, so it cannot be asked for 'memory': its lease is over"):
        dying.channel.call("memory")
    assert leaving.channel.call("memory").meta["rss_bytes"] == 0 and not leaving.channel.is_ended
    watch.close()
    for machine in (dying, leaving):
        machine.close()


def test_a_pod_that_is_lost_in_an_update_of_weights_is_left_out_of_it_alone(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store.sqlite")
    machines = [Machine(f"m{number}", number, store) for number in (1, 2, 3)]
    pods = RolloutPods([], lambda: store, "shared", 256, 9.0, LearnedDeadline(10, 30, 600))
    pods._take_part([machine.pod for machine in machines])
    machines[1].dead.set()
    reply, _ = pods.workers.update_weight({"version": [1, 2]}, {}, lambda _: None)
    # The first worker of the second pod had answered.
    assert reply["version"] == [1, 2] and reply["kv_cache_bytes"] == 4
    assert [pod.name for pod in pods.there] == ["m1", "m3"] and [each["left_out"] for each in pods.lost] == [2]
    for machine in machines:
        machine.close()


def test_one_member_is_found_without_reading_the_keys_of_all(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store.sqlite")
    with Session(store, 60) as session:
        joined = join(session, "n", {"host": "h"})
        assert find_member(store, "n") == joined == members(store)[0] and find_member(store, "m") is None
