"""Waits with an owner, a learned deadline and an id; what a peer tells of its own; the watchdog that shows, takes stacks and raises alarms."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.config.coordination import CoordinationConfig
from tandem.config.watchdog import WatchdogConfig
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.process import waits
from tandem.runtime.process.learned_deadline import LearnedDeadline
from tandem.runtime.process.processes import Threads, kill, spawn
from tandem.runtime.process.stacks import answering, stacks_in
from tandem.runtime.process.waits import LEARNS_AFTER, WAITS, Waits
from tandem.runtime.process.watchdog import Watchdog
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, RpcTimeout
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.types import RunError, UserError


def test_a_learned_deadline_follows_the_longest_time() -> None:
    deadline = LearnedDeadline(factor=10, least_s=30, most_s=600)
    assert deadline() == 600, "nothing was measured"
    deadline.answered(2)
    assert deadline() == 30, "10 x 2 s are less than the shortest one"
    deadline.answered(8)
    deadline.answered(1)
    assert deadline() == 80
    deadline.missed()
    assert deadline() == 160
    deadline.answered(50)
    assert deadline() == 600
    later = LearnedDeadline(10, 30, 600, after=2)
    later.answered(8)
    assert later() == 600
    later.answered(1)
    assert later() == 80


def test_waits_have_ids_of_their_own_and_learn_from_those_for_the_same() -> None:
    own = Waits("the controller")
    own.begin("the controller", factor=5.0, least_s=2.0)
    ids, limits = set(), []
    for _ in range(LEARNS_AFTER + 1):
        with own.wait("the trainer sidecar", "train", 100.0, learns=True) as wait:
            ids.add(wait.id)
            limits.append(wait.limit())
    assert len(ids) == LEARNS_AFTER + 1 and own.open() == []
    assert limits == [100.0] * LEARNS_AFTER + [2.0]
    with own.wait("the trainer sidecar", "save", 100.0) as wait:
        assert wait.limit() == 100.0 and wait.id in wait.describe()
        assert wait.describe().startswith("the controller waits for the trainer sidecar in 'save' since ")
    with pytest.raises(KeyError), own.wait("the trainer sidecar", "train", 100.0, learns=True):
        raise KeyError
    assert own.open() == [], "a wait that fails ends too"


def test_a_beat_behind_a_peer_is_a_sign_of_life_and_what_it_waits_for_is_told_in_the_end() -> None:
    beat = [0.0]
    shim, controller = Waits("the trainer shim"), Waits("the controller")
    of_rank = shim.wait("rank 0", "register", 100.0, state_of_peer=lambda: ("", beat[0]))
    with controller.wait("the trainer sidecar", "register", 100.0) as wait, of_rank as inner:
        time.sleep(0.2)
        wait.heard(shim.heartbeat_meta(), is_progress=False)
        assert wait.silent_s >= 0.2, "a shim that answers while its worker is silent gives no sign"
        beat[0] = time.monotonic()
        wait.heard(shim.heartbeat_meta(), is_progress=False)
        assert wait.silent_s < 0.2 and not wait.is_late
        assert wait.behind[0][0].startswith("the trainer shim waits for rank 0 in 'register'")
        # The worker waits for etcd, and says so.
        inner.heard({"waits": [["rank 0 waits for etcd", True]], "silent_s": 0.0}, is_progress=False)
        wait.heard(shim.heartbeat_meta(), is_progress=False)
        assert ("rank 0 waits for etcd", True) in wait.behind and wait.is_late and controller.late() == [wait]


def test_trouble_is_told_to_the_one_who_waits_for_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LATE_S", 0.0)
    own, told = Waits("rank 0"), []
    with own.wait("etcd", "kv/range", 240.0) as wait:
        own.troubled(wait, "connection refused")
        assert wait.is_late and wait.describe().endswith(": connection refused")
        with own.telling(told.append):
            own.troubled(wait, "connection refused")
    ((text, is_late),) = told[0]["waits"]
    assert is_late and text.startswith("rank 0 waits for etcd in 'kv/range'") and told[0]["silent_s"] == 0.0


def test_a_call_without_progress_ends_at_the_learned_deadline_though_heartbeats_go_on() -> None:
    def method(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        for _ in range(int(meta["beats"])):
            time.sleep(0.05)
            progress({"done": 1})
        time.sleep(float(meta["seconds"]))
        return {}, {}

    own = Waits("the controller")
    own.begin("the controller", factor=3.0, least_s=1.5)
    server = RpcServer({"train": method}, "secret", name="the trainer sidecar", heartbeat_s=0.05)
    server.start()
    client = RpcClient("the trainer sidecar", server.port, "secret", heartbeat_timeout_s=30.0)

    def call(beats: int, seconds: float) -> None:
        with own.wait("the trainer sidecar", "train", 60.0, learns=True) as wait:
            client.call("train", {"beats": beats, "seconds": seconds}, deadline_s=60.0, wait=wait)

    try:
        for _ in range(LEARNS_AFTER):
            call(0, 0.01)
        call(40, 0.0)  # Longer than the deadline, with progress.
        with pytest.raises(RpcTimeout, match=r"the trainer sidecar is stuck in 'train': no progress for \d+ s, after \d\.\d s at most so far"):
            call(0, 30.0)
    finally:
        server.close()


def test_an_etcd_that_is_away_is_a_wait_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LATE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    store, told = EtcdStore(CoordinationConfig(store="etcd", endpoints=(url,), deadline_s=0.3), "/tandem/run/"), []
    with WAITS.telling(told.append), pytest.raises(RunError, match="did not answer within"):
        store.get("leader")
    assert [f"waits for etcd at {url} in 'kv/range'" in told[0]["waits"][0][0], told[0]["waits"][0][1]] == [True, True]
    assert "refused" in told[0]["waits"][0][0] and WAITS.open() == []


SLEEPER = "import time\n\ndef stands_here():\n    time.sleep(60)\n\nprint('ready', flush=True)\nstands_here()\n"


def test_an_overdue_wait_leaves_the_stacks_of_all_processes_and_says_which_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper_of_a_test.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "logs").mkdir()
    own, shown = Waits(), list[str]()
    own.begin("the controller")
    stacks = tmp_path / "stacks"
    with stacks_in(stacks), Watchdog(tmp_path, stacks, shown.append, memory_alarm_bytes=2**40, lag_alarm_s=1e3, waits=own):
        started = [spawn("sleeper_of_a_test", threads=Threads(), output=tmp_path / "logs" / f"worker-{n}.out") for n in range(2)]
        try:
            while not all(b"ready" in (tmp_path / "logs" / f"worker-{n}.out").read_bytes() for n in range(2)):
                time.sleep(0.02)
            assert set(answering(stacks)) == {os.getpid(), *(each.pid for each in started)}
            started[1].send_signal(signal.SIGSTOP)
            with own.wait("the trainer sidecar", "train", 60.0) as wait:
                wait.heard({"waits": [["the shim waits for worker 1", True]]}, is_progress=False)
                said = own.expired(wait)
        finally:
            for each in started:
                kill(each)
    (path,) = (tmp_path / "logs").glob("stacks-*.txt")
    assert said == f"wait {wait.id}; the stacks of 3 processes are in '{path}'"
    text = path.read_text()
    assert wait.id in text and "the shim waits for worker 1" in text and "the controller (process" in text
    assert "stands_here" in text.split(f"worker-0 (process {started[0].pid})")[1]
    assert f"worker-1 (process {started[1].pid})\nis stopped (SIGSTOP)" in text


def test_a_process_with_the_id_of_a_dead_one_is_never_signalled(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (tmp_path / str(process.pid)).write_text("of a process that is dead")
        assert answering(tmp_path) == [] and process.poll() is None
    finally:
        kill(process)


def test_what_is_late_is_shown_until_it_goes_on_and_alarms_are_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LATE_UNKNOWN_S", 0.0)
    own, shown = Waits("the controller"), list[str]()
    with Watchdog(tmp_path, tmp_path, shown.append, memory_alarm_bytes=1.0, lag_alarm_s=1e3, waits=own) as watchdog:
        with own.wait("the reward workers", "score", 60.0):
            while len(shown) < 2:
                time.sleep(0.02)
        while shown[-1]:
            time.sleep(0.02)
        gauges = watchdog.take_gauges()
        assert gauges["controller/rss_bytes"] > 2**20 and 0 <= gauges["controller/loop_lag_s"] < 1e3
        (alarm,) = watchdog.take_alarms()
        assert "GiB of memory, more than watchdog.memory_alarm_gib" in alarm and watchdog.take_alarms() == []
    assert shown[0].startswith("the controller waits for the reward workers in 'score'") and shown[-1] == ""


@pytest.mark.parametrize(
    "values, line",
    [
        ({"deadline_factor": 1.0}, r"'watchdog\.deadline_factor' is 1; it must be more than 1"),
        ({"deadline_factor": float("nan")}, r"'watchdog\.deadline_factor' is nan; it must be more than 1"),
        ({"min_deadline_s": 0.0}, r"'watchdog\.min_deadline_s' is 0\.0; it must be above 0 seconds"),
        ({"lag_alarm_s": -1.0}, r"'watchdog\.lag_alarm_s' is -1\.0; it must be above 0 seconds"),
        ({"memory_alarm_gib": 0.0}, r"'watchdog\.memory_alarm_gib' is 0; it must be above 0"),
    ],
    ids=["factor", "nan", "seconds", "lag", "memory"],
)
def test_values_that_cannot_be_right_are_refused_in_one_line(values: dict[str, float], line: str) -> None:
    with pytest.raises(UserError, match=line):
        WatchdogConfig(**values).check()
