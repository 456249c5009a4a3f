"""Stragglers: whose own work holds up a synchronous run, and which link does, from where the time of each rank goes."""

import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from package_data import make_datasets
from watched_run import WatchedRun, throttled

from tandem.layout.mesh import MeshShape
from tandem.runtime.health.round_trips import round_trips
from tandem.runtime.health.step_times import RankTimes, StepClock, StepTimesTable, read_step_times
from tandem.runtime.health.stragglers import FEWEST_LOOKS, Late, StragglerWatch

Own = Callable[[int, int], float]


def watch_of(shape: MeshShape, factor: float = 1.3, steps: int = 16) -> StragglerWatch:
    return StragglerWatch(shape, factor, steps)


def simulate(watch: StragglerWatch, own: Own, looks: int, seed: int = 0, first: int = 0, links: Callable[[int, int, int], float] | None = None,
             transfer_s: float = 0.05, noise: float = 0.1) -> tuple[list[Late], list[Late]]:  # fmt: skip
    """Gives ``watch`` so many looks at a synchronous run, in which ``own(rank, look)`` is the own work of a rank: all have the same step, which is that of
    the slowest and ``transfer_s``, and each waits for the rest. Returns what begins and ends."""
    draw, world = random.Random(seed), watch.shape.world
    sums = {rank: [0.0, 0.0] for rank in range(world)}
    begun, ended = list[Late](), list[Late]()
    for look in range(first, first + looks):
        works = {rank: own(rank, look) * draw.uniform(1 - noise, 1 + noise) for rank in range(world)}
        step_s = max(works.values()) + transfer_s
        for rank in range(world):
            sums[rank][0] += works[rank]
            sums[rank][1] += step_s - works[rank]
        times = [
            RankTimes(
                rank, 100 + rank, look + 1, {"forward": sums[rank][0] / 3, "backward": sums[rank][0] * 2 / 3}, {"tokens": sums[rank][1]},
                {f"10.0.0.{other}": links(rank, other, look) for other in range(world) if other != rank} if links else {},
            ).on(f"n{rank}", f"10.0.0.{rank}")
            for rank in range(world)
        ]  # fmt: skip
        for found, told in zip((begun, ended), watch.look(times), strict=True):
            found.extend(told)
    return begun, ended


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_a_healthy_run_names_nobody_whatever_its_noise(world: int, noise: float) -> None:
    for seed in range(6):
        watch = watch_of(MeshShape(data=world))
        assert simulate(watch, lambda rank, look: 1.0, 40, seed, noise=noise) == ([], [])


def test_a_slow_rank_is_named_with_the_phase_and_is_so_no_longer_when_it_is_as_fast_again() -> None:
    watch = watch_of(MeshShape(data=4))
    assert simulate(watch, lambda rank, look: 1.0, 20) == ([], [])
    [late], ended = simulate(watch, lambda rank, look: 1.8 if rank == 2 else 1.0, 20, first=20, seed=1)
    assert ended == [] and late.key == "rank 2" and late.detail["rank"] == 2 and late.detail["node"] == "n2" and late.detail["phase"] == "backward"
    assert late.text.startswith("rank 2 on n2 is a straggler") and "wait for it in collectives of 'tokens'" in late.text
    assert late.detail["own_s"] > 1.2 * late.detail["usual_s"]
    begun, [ended_one] = simulate(watch, lambda rank, look: 1.0, 30, first=40, seed=2)
    assert begun == [] and ended_one.key == "rank 2" and watch.late == {}


def test_a_rank_that_is_stopped_half_of_the_time_is_named_although_its_steps_scatter() -> None:
    draw = random.Random(5)
    watch = watch_of(MeshShape(data=2))
    begun, _ = simulate(watch, lambda rank, look: 1.0 + (draw.choice([0.0, 0.5, 1.0, 1.5]) if rank == 1 else 0.0), 32)
    assert [late.key for late in begun] == ["rank 1"]


def test_some_slow_steps_and_short_steps_name_nobody() -> None:
    rare = watch_of(MeshShape(data=4))
    assert simulate(rare, lambda rank, look: 9.0 if rank == 1 and look % 4 == 0 else 1.0, 60) == ([], [])
    # The first rank writes the records: milliseconds of a step that takes hardly longer.
    short = watch_of(MeshShape(data=2))
    assert simulate(short, lambda rank, look: 0.008 if rank == 0 else 0.003, 60, transfer_s=0.001) == ([], [])


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    shape = MeshShape(data=2, pipeline=2)
    watch = watch_of(shape)
    assert simulate(watch, lambda rank, look: 2.5 if rank >= 2 else 1.0, 40) == ([], [])
    begun, _ = simulate(watch, lambda rank, look: 4.5 if rank == 3 else 2.5 if rank == 2 else 1.0, 40, first=40)
    assert [late.key for late in begun] == ["rank 3"]


def test_a_slow_link_is_named_by_its_two_nodes_among_others_or_against_its_own_past() -> None:
    def slow(rank: int, other: int, look: int) -> float:
        return 0.02 if {rank, other} == {1, 2} and look >= 20 else 0.0003

    for world in (2, 4):
        pair = {1, 2} if world == 4 else {0, 1}
        watch = watch_of(MeshShape(data=world))
        links = slow if world == 4 else lambda rank, other, look: 0.02 if look >= 20 else 0.0003
        assert simulate(watch, lambda rank, look: 1.0, 20, links=links) == ([], [])
        [late], _ = simulate(watch, lambda rank, look: 1.0, 20, first=20, links=links, transfer_s=0.5)
        assert late.is_link and set(late.detail["link"]) == {f"n{each}" for each in pair} and "a round trip takes 20 ms, and 0.3 ms" in late.text
    # A long way that costs the run nothing is no fault.
    watch = watch_of(MeshShape(data=4))
    assert simulate(watch, lambda rank, look: 1.0, 40, links=slow, transfer_s=0.01, noise=0.01) == ([], [])


def test_ranks_that_were_started_again_are_judged_anew() -> None:
    watch = watch_of(MeshShape(data=2))
    simulate(watch, lambda rank, look: 1.0, 20)
    again = [RankTimes(rank, 900, 1, {"forward": 1.0}, {}) for rank in range(2)]
    assert watch.look(again) == ([], [])
    later = [RankTimes(rank, 900, 2, {"forward": 2.0 + 50 * rank}, {}) for rank in range(2)]
    assert watch.look(later) == ([], []), f"fewer than {FEWEST_LOOKS} looks say nothing"


# -- where the time of a rank goes -----------------------------------------------------------------------------------------


def test_the_clock_of_a_rank_takes_waits_from_its_work_and_counts_no_rest(tmp_path: Path) -> None:
    now = [100.0]
    table = StepTimesTable(tmp_path / "step_times", 2)
    clock = StepClock(1, lambda record: table.write(1, record), lambda: {"10.0.0.9": 0.001}, lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    for step in range(2):
        clock.enters("data", step)
        passes(0.5)
        clock.enters("backward", step)
        passes(3.0)
        clock.waited("tokens", 2.0)
        clock.enters("checkpoint", step)
        passes(40.0)
        clock.waited("world", 30.0)
    clock.enters("data", 2)
    assert read_step_times(tmp_path / "step_times") == table.read()
    [times] = table.read()
    assert (times.rank, times.steps, times.waited_s, times.round_trip_s) == (1, 2, {"tokens": 4.0}, {"10.0.0.9": 0.001})
    assert times.own_s == {"data": 1.0, "backward": 2.0}
    passes(1.0)
    clock.rests()
    passes(99.0)
    clock.enters("train", 3)
    assert table.read()[0].own_s == {"data": 2.0, "backward": 2.0}


def test_a_record_that_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    table, ended = StepTimesTable(tmp_path / "step_times", 1), threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            clock = StepClock(0, lambda record: table.write(0, record))
            clock.enters("forward" * (number % 40 + 1), 0)
            clock.rests()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            assert all(times.rank == 0 for times in table.read())
    finally:
        ended.set()
        thread.join()


def test_round_trips_of_connections_are_those_that_the_kernel_has_measured() -> None:
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        client.bind(("127.0.0.3", 0))
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            for _ in range(5):
                client.sendall(b"ask")
                server.recv(3)
                server.sendall(b"answer")
                client.recv(6)
            found = round_trips()
            assert 0 < found["127.0.0.2"] < 1 and 0 < found["127.0.0.3"] < 1
            client.sendall(b"usable")
            assert server.recv(6) == b"usable", "looking at a connection does not change it"


# -- the real command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


@pytest.mark.full
def test_a_throttled_rank_is_named_in_the_journal_the_output_and_the_metrics_until_it_is_as_fast_as_the_other(data: Path, tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, data, health={"straggler_steps": 12})
    try:
        run.wait_for_step(24)
        assert run.events("straggler") == [], "a healthy run gives no false alarm"
        with throttled(run.rank_pid(1)):
            found = run.wait_for("straggler")
            assert found.detail["rank"] == 1 and found.detail["node"] == socket.gethostname()
            assert found.detail["phase"] in ("forward", "backward", "optimizer", "train", "data", "reduce")
            run.wait_for_metric(1.0, "tandem_rank_straggler", rank="1", node=socket.gethostname(), run="run")
            assert run.metric("tandem_rank_straggler", rank="0") == 0.0 and run.metric("tandem_events_total", kind="straggler") == 1.0
            assert (run.metric("tandem_rank_late_seconds", rank="1") or 0.0) > 0 and run.metric("tandem_rank_own_seconds_total", rank="1", phase="forward")
        over = run.wait_for("straggler_over")
        run.wait_for_metric(0.0, "tandem_rank_straggler", rank="1")
        assert over.detail["rank"] == 1 and len(run.events("straggler")) == 1
        assert "rank 1 on" in run.output.read_text() and "is a straggler" in run.output.read_text()
    finally:
        run.end()
