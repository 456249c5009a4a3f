"""The heartbeat table and the hang watchdog with its adaptive deadline; stacks of other processes; collectives with a deadline."""

import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tandem.layout.mesh import Mesh, MeshShape
from tandem.runtime.collectives.communicator import CollectiveError, join
from tandem.runtime.process.deadline import LOOK_S, Deadline, PauseClock
from tandem.runtime.process.hang_watchdog import FACTOR, START_S, HangWatchdog
from tandem.runtime.process.heartbeat_table import HeartbeatTable, RankState
from tandem.runtime.process.stacks import innermost, stacks_of

DEADLINE_S = 3.0
STATE = RankState(0, 100, 1000.0, 0, "forward", "", "", 0.0, 0, 0, 0.0)


def test_board_says_what_a_rank_does_and_waits_for(tmp_path: Path) -> None:
    board = HeartbeatTable(tmp_path / "board", 2)
    other = HeartbeatTable(tmp_path / "board", 2)
    writer = board.writer(1)
    writer.phase_is("backward", 7)
    writer.started("tokens", "gradients of layer 3", 640)
    writer.waits("tokens", "gradients of layer 3")
    nobody, state = other.states()
    assert nobody.beat_s == 0 and nobody.describe(0.0) == "rank 0 has not begun"
    assert (state.step, state.phase, state.collective, state.group, state.sent_bytes) == (7, "backward", "gradients of layer 3", "tokens", 640)
    assert state.describe(state.since_s + 2) == (
        "rank 1 waits in the collective 'gradients of layer 3' ('tokens') in 'backward' of step 7 for 2.0 s"
    )
    writer.waited(0.5)
    assert other.states()[1].collective == "" and other.states()[1].waited_s == 0.5
    board.clear()
    assert other.states()[1].beat_s == 0


def test_clock_of_the_day_that_jumps_is_no_hang_and_hides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = HeartbeatTable(tmp_path / "board", 1)
    writer, began = board.writer(0), time.monotonic()
    for jump_s in (0.0, 1e6, -1e6):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 2e9 + jump_s)
        writer.waits("tokens", "the loss")
        (state,) = board.states()
        assert began <= state.since_s <= state.beat_s <= time.monotonic()
        assert HangWatchdog(10.0, 1.0).look([state], time.monotonic()) == [] and HangWatchdog(10.0, 1.0).look([state], time.monotonic() + 11) == [state]


def watched(pause_s: float, steps: int, watch: HangWatchdog) -> float:
    """Simulates two ranks that beat every ``pause_s`` for ``steps`` steps; returns the time at the end."""
    now = 1000.0
    for step in range(steps + 1):
        now += pause_s
        assert watch.look([replace(STATE, rank=rank, step=step, beat_s=now) for rank in range(2)], now) == []
    return now


@pytest.mark.parametrize("pause_s", [0.5, 2.0])
def test_deadline_follows_from_the_pauses_that_were_seen(pause_s: float) -> None:
    watch = HangWatchdog(first_s=300.0, least_s=1.0)
    assert watch.deadline_s("forward") == 300.0
    now = watched(pause_s, 5, watch)
    assert watch.deadline_s("forward") == pytest.approx(FACTOR * pause_s)
    assert watch.deadline_s("checkpoint") == 300.0
    stuck = [replace(STATE, step=5, beat_s=now, collective="the loss"), replace(STATE, rank=1, step=5, beat_s=now)]
    assert watch.look(stuck, now + FACTOR * pause_s) == []
    assert [state.rank for state in watch.look(stuck, now + FACTOR * pause_s + 1)] == [1]


def test_rank_that_waits_for_another_is_not_the_one_that_is_stuck() -> None:
    watch = HangWatchdog(first_s=10.0, least_s=1.0)
    waits = replace(STATE, collective="the loss", beat_s=1000.0)
    idle = replace(STATE, rank=1, beat_s=1001.0)
    assert [state.rank for state in watch.look([waits, idle], 1012.0)] == [1]
    # Both wait in different calls: the one with fewer calls is behind.
    behind = replace(idle, collective="the gradient norm", collectives=4)
    assert [state.rank for state in watch.look([replace(waits, collectives=5), behind], 1012.0)] == [1]


def test_ranks_that_wait_for_another_machine_have_the_longest_time_twice_and_one_that_is_stuck_here_has_not() -> None:
    watch = HangWatchdog(first_s=60.0, least_s=1.0, sees_all=False)
    now = watched(0.5, 5, watch)
    waits = [replace(STATE, rank=rank, step=5, beat_s=now, collective="the loss") for rank in range(2)]
    # The rank that they wait for may be saving; the supervisor of its machine sees it.
    assert watch.look(waits, now + 119) == []
    assert [state.rank for state in watch.look(waits, now + 121)] == [0, 1]
    assert [state.rank for state in watch.look([waits[0], replace(waits[1], collective="")], now + 11)] == [1]


def test_rank_that_reads_data_or_saves_has_the_whole_time_and_so_have_those_who_wait_for_it() -> None:
    watch = HangWatchdog(first_s=300.0, least_s=1.0)
    now = watched(0.5, 5, watch)
    waits = replace(STATE, step=5, phase="train", collective="counts of the batch", beat_s=now)
    for phase in ("data", "checkpoint"):
        reads = replace(STATE, rank=1, step=5, phase=phase, beat_s=now)
        assert watch.look([waits, reads], now + 299) == []
        assert [state.rank for state in watch.look([waits, reads], now + 301)] == [1]


def test_rank_that_has_not_begun_is_no_hang_and_neither_is_a_slow_start() -> None:
    watch = HangWatchdog(first_s=10.0, least_s=1.0)
    assert watch.look([STATE, replace(STATE, rank=1, beat_s=0.0)], 5000.0) == []
    assert watch.look([STATE, replace(STATE, rank=1)], 1009.0) == []


def test_pause_of_the_supervisor_starts_every_deadline_anew_and_is_no_gap_to_learn_from() -> None:
    watch = HangWatchdog(first_s=300.0, least_s=1.0)
    now = watched(0.5, 5, watch)
    learned, resumed = watch.learned.longest_s, now + 100
    stopped = [replace(STATE, rank=rank, step=5, beat_s=now) for rank in range(2)]
    assert watch.look(stopped, resumed + 0.1, resumed) == []
    # Rank 0 continues before the supervisor notices, rank 1 never does.
    states = [replace(stopped[0], beat_s=resumed - 0.5), stopped[1]]
    assert watch.look(states, resumed + 0.2, resumed) == [] and watch.learned.longest_s == learned
    states = [replace(stopped[0], beat_s=resumed + 9), stopped[1]]
    assert watch.look(states, resumed + FACTOR * learned - 0.1, resumed) == []
    assert [state.rank for state in watch.look(states, resumed + FACTOR * learned + 0.1, resumed)] == [1]


def test_rank_that_never_begins_is_found_after_the_deadline_of_the_start() -> None:
    watch = HangWatchdog(first_s=10.0, least_s=1.0)
    states = [STATE, replace(STATE, rank=1, beat_s=0.0)]
    assert watch.look(states, 5000.0) == [] and watch.look(states, 5000.0 + START_S) == []
    assert watch.look(states, 5001.0 + START_S, resumed_s=5010.0) == []
    assert [state.rank for state in watch.look(states, 5001.0 + START_S)] == [1]


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_deadline_starts_anew_after_a_pause_and_runs_out_without_one() -> None:
    now = Clock()
    clock = PauseClock(now)
    outer = Deadline(20.0, clock=clock)
    inner = Deadline(5.0, outer, clock)
    for _ in range(8):
        now.now_s += LOOK_S
        assert inner.nap_s() == LOOK_S
    assert inner.left_s() == 3.0 and outer.left_s() == 18.0
    now.now_s += 1000.0
    assert inner.left_s() == 5.0 and outer.left_s() == 20.0
    for _ in range(20):
        now.now_s += LOOK_S
        inner.left_s()
    assert inner.passed and not outer.passed and outer.left_s() == 15.0
    with pytest.raises(TimeoutError):
        inner.nap_s()
    assert Deadline(math.inf, clock=clock).nap_s() is None


SLEEPER = """
import sys, time
from pathlib import Path
from tandem.runtime.process.stacks import answer_with_stacks

def wait_for_ever():
    print("ready", flush=True)
    while True:
        time.sleep(60)

answer_with_stacks(Path(sys.argv[1]))
wait_for_ever()
"""


def test_stacks_come_from_a_process_that_sleeps_and_not_from_one_that_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (found,) = stacks_of(path, [process.pid]).values()
        assert innermost(found).startswith("wait_for_ever (<string>:")
        process.send_signal(signal.SIGSTOP)
        assert stacks_of(path, [process.pid], wait_s=0.2) == {process.pid: ""}
        assert stacks_of(tmp_path / "nothing", [process.pid], wait_s=0.2) == {process.pid: ""}
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_collective_that_does_not_end_is_named_after_its_deadline(tmp_path: Path) -> None:
    code = (
        "import sys, time, torch, torch.distributed as dist\n"
        "from tandem.layout.mesh import Mesh, MeshShape\n"
        "from tandem.runtime.collectives.communicator import join\n"
        "print('ready', flush=True)\n"
        "held = join(Mesh(MeshShape(data=2), 1), dist.FileStore(sys.argv[1], 2), torch.device('cpu'), 60.0)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        board = HeartbeatTable(tmp_path / "board", 2)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        tokens = join(Mesh(MeshShape(data=2), 0), store, torch.device("cpu"), DEADLINE_S, board.writer(0))["tokens"]
        with pytest.raises(CollectiveError, match=r"rank 0 of 2 \('tokens'\): the collective 'gradients of layer 3' failed: .*[Tt]imed out"):
            tokens.reduce_scatter(torch.ones(2, 5), "gradients of layer 3")
        assert board.states()[0].collective == "gradients of layer 3"
    finally:
        process.kill()
        process.wait()
