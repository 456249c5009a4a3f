"""Copies of checkpoints in object storage: complete or absent, continued after a death, pruned, and read if the disk is lost."""

import logging
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.collectives.communicator import Communicator
from tandem.storage.files import Storage, open_storage, read
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import newest_whole
from tandem.trainer.checkpoint.format.manifest import verify
from tandem.trainer.checkpoint.format.shard import Key, Shard
from tandem.trainer.checkpoint.remote import fetch_newest, prune_uploads, upload, uploaded_steps
from tandem.trainer.checkpoint.uploader import Uploader
from tandem.types import RunError

ALONE = Communicator("world", 0, 1, None, 60.0)


def write(folder: Path, *steps: int, keep: int = 9, uploader: Uploader | None = None) -> None:
    checkpointer = Checkpointer(
        folder, keep, ALONE, {}, on_committed=uploader.add if uploader else None, in_use=uploader.in_use if uploader else tuple
    )
    for step in steps:
        values = torch.full((50, 100), float(step))
        checkpointer.save(step, [Shard(Key("weights", "x"), (50, 100), ShardOffsets((0, 0), (50, 100)), values)], {"updates": step})
    checkpointer.wait()
    checkpointer.close()


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return open_storage(str(tmp_path / "storage"), create=True)
    return open_storage(f"{request.getfixturevalue('s3_url')}/{tmp_path.name}")


def test_checkpoint_goes_there_and_comes_back_whole_and_older_copies_go(storage: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, 1, 2, 3)
    for step in (1, 2, 3):
        assert upload(storage, folder / f"step-{step}") == sum(path.stat().st_size for path in (folder / f"step-{step}").iterdir())
    assert uploaded_steps(storage) == [1, 2, 3]
    assert prune_uploads(storage, 2) == [1] and uploaded_steps(storage) == [2, 3]
    assert not [file for file in storage.files() if file.name.startswith("step-1/")]
    lost = tmp_path / "lost"
    assert fetch_newest(storage, lost) == 3
    verify(lost / "step-3")
    assert {path.name: path.read_bytes() for path in (lost / "step-3").iterdir()} == {path.name: path.read_bytes() for path in (folder / "step-3").iterdir()}
    assert fetch_newest(storage, lost, newer_than=3) is None


def test_damaged_copy_is_passed_over_for_the_one_before(storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoints"
    write(folder, 1, 2)
    upload(storage, folder / "step-1")
    upload(storage, folder / "step-2")
    data = bytearray(read(storage, "step-2/rank-00000.safetensors"))
    data[-1] ^= 1
    (tmp_path / "x").write_bytes(data)
    storage.put("step-2/rank-00000.safetensors", tmp_path / "x")
    with caplog.at_level(logging.WARNING):
        assert fetch_newest(storage, tmp_path / "lost") == 1
    assert "step-2' is skipped: 'rank-00000.safetensors' does not have the digest" in caplog.text
    assert [path.name for path in (tmp_path / "lost").iterdir()] == ["step-1"]
    # The next copy of the same step repairs the wrong files only.
    assert upload(storage, folder / "step-2") == len(data)
    assert fetch_newest(storage, tmp_path / "again") == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from tandem.storage import files
from tandem.trainer.checkpoint.remote import upload
storage, real, count = files.open_storage(sys.argv[1]), files.FolderStorage.copy, [0]
def copy(self, name, source):
    count[0] += 1
    if count[0] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, name, source)
files.FolderStorage.copy = copy
upload(storage, Path(sys.argv[2]))
"""


def test_copy_that_is_killed_counts_for_nothing_and_the_next_sends_only_the_rest(tmp_path: Path) -> None:
    folder, target = tmp_path / "checkpoints", tmp_path / "storage"
    write(folder, 1, 2)
    storage = open_storage(str(target), create=True)
    upload(storage, folder / "step-1")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, target, folder / "step-2", "3"], timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert uploaded_steps(storage) == [1] and fetch_newest(storage, tmp_path / "lost") == 1
    there = {file.name for file in storage.files() if file.name.startswith("step-2/")}
    assert len(there) == 2
    assert prune_uploads(storage, 1) == [], "what is newer than the newest whole one is on its way"
    rest = sum(path.stat().st_size for path in (folder / "step-2").iterdir() if f"step-2/{path.name}" not in there)
    assert upload(storage, folder / "step-2") == rest
    assert fetch_newest(storage, tmp_path / "lost") == 2


class Failing:
    """A storage that fails for a while, and can delay a copy."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.is_down = storage, False
        self.going_on = threading.Event()
        self.going_on.set()
        self.reached = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def copy(self, name: str, source: Path) -> None:
        self.reached.set()
        assert self.going_on.wait(60)
        if self.is_down:
            raise RunError("'s3://x' does not answer as it should: down")
        self._storage.copy(name, source)


def test_storage_that_is_down_costs_a_line_and_the_next_checkpoint_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.trainer.checkpoint.remote.PAUSES_S", (0.0,))
    failing = Failing(open_storage(str(tmp_path / "storage"), create=True))
    said: list[str] = []
    uploader = Uploader(failing, tmp_path / "checkpoints", 2, lambda: {"config.yaml": tmp_path / "config.yaml"}, on_message=said.append)  # type: ignore[arg-type]
    (tmp_path / "config.yaml").write_text("x: 1\n")
    failing.is_down = True
    write(tmp_path / "checkpoints", 1, uploader=uploader)
    with pytest.raises(RunError, match=r"step 1 is complete in '.*step-1' but not uploaded: 's3://x' does not answer"):
        uploader.finish()
    assert len(said) == 1 and "\n" not in said[0]
    failing.is_down = False
    write(tmp_path / "checkpoints", 2, uploader=uploader)
    uploader.finish()
    uploader.close()
    assert uploaded_steps(failing) == [2]  # type: ignore[arg-type]
    assert (tmp_path / "storage" / "config.yaml").read_text() == "x: 1\n"


def test_checkpoint_that_is_being_copied_is_not_pruned_and_waiting_ones_are_passed_over(tmp_path: Path) -> None:
    slow = Failing(open_storage(str(tmp_path / "storage"), create=True))
    folder = tmp_path / "checkpoints"
    uploader = Uploader(slow, folder, 5)  # type: ignore[arg-type]
    slow.going_on.clear()
    write(folder, 1, keep=1, uploader=uploader)
    assert slow.reached.wait(60)
    write(folder, 2, 3, 4, keep=1, uploader=uploader)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-4"]
    slow.going_on.set()
    uploader.finish()
    uploader.close()
    assert uploaded_steps(slow) == [1, 4]  # type: ignore[arg-type]
    shutil.rmtree(folder)
    assert fetch_newest(slow, folder) == 4 and newest_whole(folder, ALONE).step == 4  # type: ignore[union-attr, arg-type]


def test_start_model_that_a_run_without_a_complete_copy_left_behind_is_replaced(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "storage"), create=True)
    (tmp_path / "old").write_text("weights of the run before")
    (tmp_path / "new").write_text("weights of this very run.")
    storage.copy("start/model.safetensors", tmp_path / "old")
    uploader = Uploader(storage, tmp_path / "checkpoints", 2, once={"start/model.safetensors": tmp_path / "new"})
    write(tmp_path / "checkpoints", 1, uploader=uploader)
    uploader.finish()
    uploader.close()
    assert (tmp_path / "storage" / "start" / "model.safetensors").read_text() == "weights of this very run."
