"""Two-phase writes: committed files are whole, damaged ones are refused, and a full disk loses nothing."""

import errno
import json
import signal
import subprocess
import sys

import pytest
import torch

from tandem.model.huggingface.safetensors_file import write_file
from tandem.trainer.checkpoint.format.commit import MARKER, commit_folder, damage, discard, read_digest, sweep
from tandem.types import RunError


def writes(**files):
    def write(folder):
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return write


def test_a_committed_folder_is_whole_and_nothing_else_is_left(tmp_path):
    digest = commit_folder(tmp_path / "step-1", writes(a=b"one", b=b"two"))
    assert damage(tmp_path / "step-1") is None
    assert read_digest(tmp_path / "step-1") == digest
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_the_digest_is_of_names_and_bytes_alone(tmp_path):
    first = commit_folder(tmp_path / "x", writes(a=b"one", b=b"two"))
    assert commit_folder(tmp_path / "y", writes(b=b"two", a=b"one")) == first
    assert commit_folder(tmp_path / "z", writes(a=b"two", b=b"one")) != first


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda folder: (folder / "a").write_bytes(b"onE"), "'a' does not have the digest"),
        (lambda folder: (folder / "a").write_bytes(b"on"), "'a' has 2 bytes instead of 3"),
        (lambda folder: (folder / "b").unlink(), "'b' cannot be read"),
        (lambda folder: (folder / MARKER).unlink(), "never completed"),
        (lambda folder: (folder / MARKER).write_text("{"), "marker cannot be read"),
        (lambda folder: (folder / MARKER).write_text("[]"), "marker cannot be read"),
        (lambda folder: forge(folder / MARKER), "marker is damaged"),
    ],
)
def test_any_harm_to_a_committed_folder_is_named(tmp_path, harm, named):
    commit_folder(tmp_path / "step-1", writes(a=b"one", b=b"two"))
    harm(tmp_path / "step-1")
    assert named in damage(tmp_path / "step-1")


def forge(marker):
    content = json.loads(marker.read_text())
    content["files"]["a"]["size"] = 4
    marker.write_text(json.dumps(content))


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    assert damage(tmp_path / "nothing") == "it does not exist"


def test_the_same_bytes_again_leave_the_folder_and_others_replace_it(tmp_path):
    final = tmp_path / "step-1"
    commit_folder(final, writes(a=b"one"))
    inode = final.stat().st_ino
    commit_folder(final, writes(a=b"one"))
    assert final.stat().st_ino == inode
    commit_folder(final, writes(a=b"two"))
    assert (final / "a").read_bytes() == b"two"
    assert damage(final) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_damaged_folder_is_replaced_by_a_new_commit_of_the_same_step(tmp_path):
    final = tmp_path / "step-1"
    commit_folder(final, writes(a=b"one"))
    (final / "a").write_bytes(b"bad")
    commit_folder(final, writes(a=b"one"))
    assert damage(final) is None


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied")]
)
def test_a_write_that_fails_is_one_line_and_what_stood_there_stays(tmp_path, error):
    final = tmp_path / "step-1"
    commit_folder(final, writes(a=b"one"))

    def fail(folder):
        (folder / "a").write_bytes(b"tw")
        raise error

    with pytest.raises(RunError) as caught:
        commit_folder(final, fail)
    assert str(final) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (final / "a").read_bytes() == b"one"
    assert damage(final) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from tandem.trainer.checkpoint.format.commit import commit_folder
from tandem.model.huggingface.safetensors_file import write_file
from tandem.types import RunError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    commit_folder(Path(sys.argv[1]), lambda f: write_file(f / "x.safetensors", [("x", torch.zeros(200_000))]))
except RunError as error:
    print(error)
"""


def test_a_file_that_the_system_refuses_to_grow_is_a_full_disk_and_the_old_folder_stays(tmp_path):
    final = tmp_path / "step-1"
    commit_folder(final, writes(a=b"one"))
    done = subprocess.run([sys.executable, "-c", LIMITED, final], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stdout
    assert damage(final) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_full_file_system_is_one_line_and_the_old_folder_stays(small_disk):
    disk = small_disk("256k")
    commit_folder(disk / "step-1", writes(a=b"one"))
    with pytest.raises(RunError, match="no space left"):
        commit_folder(disk / "step-2", lambda f: write_file(f / "x", [("x", torch.zeros(100_000))]))
    assert damage(disk / "step-1") is None
    assert [p.name for p in disk.iterdir()] == ["step-1"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tandem.trainer.checkpoint.format.commit import commit_folder
def write(folder):
    (folder / "a").write_bytes(b"two")
    os.kill(os.getpid(), signal.SIGKILL)
commit_folder(Path(sys.argv[1]), write)
"""


def test_a_writer_that_dies_leaves_the_old_folder_and_rubble_that_is_swept(tmp_path):
    final = tmp_path / "step-1"
    commit_folder(final, writes(a=b"one"))
    done = subprocess.run([sys.executable, "-c", KILLED, final], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    assert (final / "a").read_bytes() == b"one"
    assert damage(final) is None
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_discarded_folder_is_gone(tmp_path):
    commit_folder(tmp_path / "step-1", writes(a=b"one"))
    discard(tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []
