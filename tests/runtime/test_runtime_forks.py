"""Workers that a fork server starts are those that ``spawn`` starts, but that their modules are imported once."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.layout.mesh import MeshShape
from tandem.runtime.process.forks import ForkServer, SharedForkServer
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.process.worker_group import GroupForks, GroupSettings
from tandem.runtime.rpc.calls import WorkerDied

HELPERS = {"PYTHONPATH": str(Path(__file__).parent / "helpers")}


@contextlib.contextmanager
def serving(tmp_path: Path, *modules: str) -> Iterator[ForkServer]:
    server = ForkServer(modules, threads=Threads(1), environment=HELPERS, output=tmp_path / "server.out")
    try:
        yield server
    finally:
        server.close()


def start(forks: SharedForkServer | None, tmp_path: Path, *, listener: int = -1, descriptors: Sequence[int] = ()) -> Worker:
    return Worker(
        "the worker", "forked_worker", [str(listener)], threads=Threads(1), output=tmp_path / "worker.out", environment={**HELPERS, "FORKED_TEST": "here"},
        new_session=True, pass_fds=descriptors, forks=forks,
    )  # fmt: skip


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_ended(*pids: int) -> None:
    ends = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_workers_are_forked_with_a_session_environment_output_and_descriptors_of_their_own_and_the_modules_are_imported_once(tmp_path: Path) -> None:
    with serving(tmp_path, "forked_worker") as forks, socket.socket() as listener:
        workers = [start(forks, tmp_path, listener=listener.fileno(), descriptors=[listener.fileno()]) for _ in range(2)]
        replies = [worker.call("describe", deadline_s=30).meta for worker in workers]
        for worker, reply in zip(workers, replies, strict=True):
            assert reply["pid"] == worker.pid == reply["session"] and reply["parent"] == reply["imported_by"] == forks.pid
            assert reply["variable"] == "here" and reply["listens"] and "default_int_handler" in reply["interrupt"]
            shown = Path(f"/proc/{worker.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            assert shown[1:3] == [b"-m", b"tandem.runtime.process.child"] and shown[4:6] == [b"worker", b"forked_worker"] and b"--channel" in shown
            assert b"FORKED_TEST" not in Path(f"/proc/{forks.pid}/environ").read_bytes()
        assert [worker.stop() for worker in workers] == [0, 0]
        with pytest.raises(WorkerDied):
            workers[0].call("describe", deadline_s=5)


def test_how_a_forked_worker_ends_is_known_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "forked_worker") as forks:
        worker, killed = start(forks, tmp_path), start(forks, tmp_path)
        with pytest.raises(WorkerDied, match="exit status 3"):
            worker.call("fail", {"status": 3}, deadline_s=30)
        assert killed.alive and killed.process.poll() is None
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.process.wait(10) == -signal.SIGKILL and killed.process.wait() == killed.process.returncode == killed.process.poll()
        assert not killed.alive and forks.alive
        # The server has waited for both, and leaves nothing behind.
        until_ended(worker.pid, killed.pid)
        assert not Path(f"/proc/{worker.pid}").exists() and not Path(f"/proc/{killed.pid}").exists()


def test_a_server_that_is_killed_takes_its_workers_along_and_the_next_worker_is_started_without_it(tmp_path: Path) -> None:
    with serving(tmp_path, "forked_worker") as forks:
        worker = start(forks, tmp_path)
        os.kill(forks.pid, signal.SIGKILL)
        until_ended(worker.pid)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.call("describe", deadline_s=30)
        another = start(forks, tmp_path)
        assert another.call("describe", deadline_s=30).meta["imported_by"] == another.pid
        another.stop()


def test_who_shares_a_server_has_workers_of_its_own_which_end_with_its_connection_and_all_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "forked_worker") as forks:
        first, second = (SharedForkServer(forks.share()) for _ in range(2))
        ends, stays = start(first, tmp_path), start(second, tmp_path)
        assert [worker.call("describe", deadline_s=30).meta["imported_by"] for worker in (ends, stays)] == [forks.pid] * 2
        first.close()
        until_ended(ends.pid)
        assert not first.alive and second.alive and stays.call("describe", deadline_s=30).meta["pid"] == stays.pid
        with pytest.raises(WorkerDied, match="SIGKILL"):
            ends.call("describe", deadline_s=30)
        os.kill(stays.pid, signal.SIGTERM)
        assert stays.process.wait(30) == -signal.SIGTERM, "each learns how its own have ended"
        last = start(second, tmp_path)
        os.kill(forks.pid, signal.SIGKILL)
        until_ended(last.pid)
        assert not second.alive
        settings = GroupSettings("the group", "forked_worker", tmp_path, tmp_path / "group", 1, environment=HELPERS)
        with contextlib.closing(GroupForks(second)) as own:
            assert isinstance(own.of(settings, MeshShape()), ForkServer), "a server of one's own takes the place of one that has ended"


def test_a_process_with_threads_is_not_forked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, "threaded_module") as forks:
        worker = start(forks, tmp_path)
        assert "the worker is not forked: it has 2 threads" in caplog.text
        assert worker.call("describe", deadline_s=30).meta["imported_by"] == worker.pid
        worker.stop()


def test_a_process_that_has_opened_the_device_file_of_a_gpu_is_not_forked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, "device_module") as forks:
        worker = start(forks, tmp_path)
        assert "the worker is not forked: it has opened the device file /dev/zero, so it may have a context on a GPU" in caplog.text
        assert worker.call("describe", deadline_s=30).meta["imported_by"] == worker.pid
        worker.stop()


def test_ranks_are_started_by_themselves_where_the_recipe_says_so(tmp_path: Path) -> None:
    settings = GroupSettings("the group", "forked_worker", tmp_path, tmp_path / "group", 1, environment=HELPERS)
    with contextlib.closing(GroupForks()) as forks:
        assert forks.of(replace(settings, forked=False), MeshShape()) is None and not (tmp_path / "logs").exists()
        assert forks.of(settings, MeshShape()) is not None
