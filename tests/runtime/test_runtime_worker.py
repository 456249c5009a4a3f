import os
import signal
import threading
from pathlib import Path

import pytest

from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import RemoteError, RpcTimeout, WorkerDied
from tandem.types import RunError, UserError

HELPERS = str(Path(__file__).parent / "helpers")


def start(tmp_path, *arguments):
    environment = {"PYTHONPATH": HELPERS}
    output = tmp_path / "worker.log"
    return Worker("trainer worker", "channel_worker", arguments, threads=Threads(1), output=output, environment=environment)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    running = start(tmp_path_factory.mktemp("worker"))
    yield running
    running.stop()


def test_a_call_comes_back_with_its_bytes_and_progress(worker):
    heard = []
    blobs = {"big": os.urandom(3 * 2**20), "empty": b""}
    reply = worker.call("echo", {"x": 0.1, "progress": 3}, blobs, deadline_s=20, on_progress=heard.append)
    assert reply.meta == {"x": 0.1, "progress": 3} and dict(reply.blobs) == blobs
    assert heard == [{"done": 0}, {"done": 1}, {"done": 2}]


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_an_error_for_the_user_comes_back_as_itself(worker, kind):
    with pytest.raises(kind) as caught:
        worker.call("fail", {"kind": kind.__name__, "text": "'x' is 3; make it 4"}, deadline_s=20)
    assert type(caught.value) is kind and str(caught.value) == "'x' is 3; make it 4"


@pytest.mark.parametrize("kind", ["ValueError", "ConnectionError"])
def test_a_defect_names_the_worker_and_the_traceback_is_in_the_log(worker, caplog, kind):
    with pytest.raises(RemoteError, match=f"'fail' raised {kind} in trainer worker: odd"):
        worker.call("fail", {"kind": kind, "text": "odd\nand more"}, deadline_s=20)
    assert "in fail" in caplog.text and f"{kind}: odd" in caplog.text
    assert worker.call("echo", deadline_s=20).meta == {}


def test_an_unknown_call_is_an_error_and_the_worker_lives(worker):
    with pytest.raises(RemoteError, match="no call 'nothing'"):
        worker.call("nothing", deadline_s=20)
    assert worker.alive


def test_calls_from_many_threads_are_served_in_turn(worker):
    replies = {}

    def ask(i):
        replies[i] = worker.call("echo", {"i": i, "progress": 2}, {"b": bytes([i]) * 100_000}, deadline_s=20)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(replies[i].meta["i"] == i and replies[i].blobs["b"][:1] == bytes([i]) for i in range(6))


@pytest.mark.parametrize(("meta", "how"), [({}, "killed by SIGKILL"), ({"status": 3}, "exit status 3")])
def test_a_worker_that_dies_in_a_call_is_named_with_how(tmp_path, meta, how):
    running = start(tmp_path)
    with pytest.raises(WorkerDied, match=f"trainer worker died while 'die' ran: {how}"):
        running.call("die", meta, deadline_s=20)
    with pytest.raises(WorkerDied):
        running.call("echo", deadline_s=20)
    assert not running.alive


def test_kill_9_from_outside_ends_the_wait_at_once(tmp_path):
    running = start(tmp_path)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        running.call("hang", deadline_s=50, on_progress=lambda progress: os.kill(progress["pid"], signal.SIGKILL))


def test_a_worker_that_died_between_calls_is_found_by_the_next(tmp_path):
    running = start(tmp_path)
    running.call("echo", deadline_s=20)
    os.kill(running.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        running.call("echo", deadline_s=20)


def test_a_dead_worker_is_found_though_its_child_holds_the_channel(tmp_path):
    running = start(tmp_path)
    with pytest.raises(WorkerDied, match="exit status 3"):
        running.call("orphan", deadline_s=20)


def test_a_stuck_worker_is_named_shows_its_stack_and_is_killed(tmp_path):
    running = start(tmp_path)
    running.call("echo", deadline_s=60)
    with pytest.raises(RpcTimeout, match=r"trainer worker was stuck in 'hang': no result within 1\.5 s; it was killed"):
        running.call("hang", deadline_s=1.5)
    assert running.process.poll() is not None
    log = (tmp_path / "worker.log").read_text()
    assert "Fatal Python error: Aborted" in log and "in hang" in log


def test_a_worker_ends_when_its_channel_closes(tmp_path):
    running = start(tmp_path)
    running.call("echo", deadline_s=20)
    assert running.stop() == 0
    with pytest.raises(WorkerDied, match="was stopped"):
        running.call("echo", deadline_s=20)


def test_a_fault_point_kills_the_worker_after_its_work_and_before_its_answer(tmp_path):
    arguments = ("--fault", "trainer_worker:after:train:3", "--directory", str(tmp_path))
    running = start(tmp_path, *arguments)
    assert running.call("train", {"step": 2}, deadline_s=20).meta == {"step": 2}
    with pytest.raises(WorkerDied, match="SIGKILL"):
        running.call("train", {"step": 3}, deadline_s=20)
    again = start(tmp_path, *arguments)
    assert again.call("train", {"step": 3}, deadline_s=20).meta == {"step": 3}
    again.stop()


def test_a_call_after_stop_does_not_wait(tmp_path):
    running = start(tmp_path)
    running.stop()
    with pytest.raises(WorkerDied, match="was stopped"):
        running.call("hang", deadline_s=50)


def test_a_worker_that_answers_with_rubbish_is_killed_and_named(tmp_path):
    running = start(tmp_path)
    with pytest.raises(WorkerDied, match="trainer worker sent a broken frame while 'rubbish' ran and was killed: not a frame: it starts with b'<htm'"):
        running.call("rubbish", deadline_s=20)
    assert not running.alive and running.process.poll() is not None


def test_stopping_a_worker_ends_a_call_in_progress_of_another_thread(tmp_path):
    running = start(tmp_path)
    begun, caught = threading.Event(), []

    def ask():
        try:
            running.call("hang", deadline_s=50, on_progress=lambda _: begun.set())
        except WorkerDied as death:
            caught.append(str(death))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(20)
    running.stop(grace_s=0.0)
    thread.join(10)
    assert len(caught) == 1 and "died while 'hang' ran" in caught[0]
    with pytest.raises(WorkerDied):
        running.call("echo", deadline_s=20)


def test_the_answer_of_an_interrupted_call_is_not_taken_for_the_next_ones(worker):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.call("echo", {"i": 1, "progress": 5}, {"b": bytes(100_000)}, deadline_s=20, on_progress=interrupt)
    assert worker.call("echo", {"i": 2}, deadline_s=20).meta == {"i": 2}
