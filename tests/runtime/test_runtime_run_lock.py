"""Who holds the lock of a run, asked without taking it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.runtime.records.run_lock import RunLock, lock_holder

HOLD = """\
import pathlib, sys
from tandem.runtime.records.run_lock import RunLock
held = RunLock(pathlib.Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def test_the_holder_is_named_while_it_lives(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    with RunLock(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()
    assert lock_holder(tmp_path) is None, "the file of the lock stays"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert lock_holder(tmp_path) == process.pid
        process.kill()
        process.wait()
        assert lock_holder(tmp_path) is None


def test_asking_takes_no_lock_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path):
        monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("a lock was taken"))
        monkeypatch.setattr(fcntl, "lockf", lambda *_: pytest.fail("a lock was taken"))
        before = (tmp_path / "lock").stat()
        assert lock_holder(tmp_path) == os.getpid() and lock_holder(tmp_path / "none") is None
        assert (tmp_path / "lock").stat().st_mtime_ns == before.st_mtime_ns and not (tmp_path / "none").exists()
        monkeypatch.undo()
