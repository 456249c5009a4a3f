import mmap
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tandem.types import RunError
from tandem.weight_transfer.shared_memory import FOLDER, Segment, WeightBuffers, sweep

HELPER = str(Path(__file__).parent / "helpers_weights.py")


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, HELPER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def pod_id():
    name = "test" + uuid.uuid4().hex[:8]
    yield name
    for path in FOLDER.glob(f"tandem-{name}-*"):
        path.unlink()


def test_a_segment_has_its_pages_its_name_and_its_owner_only(pod_id):
    with Segment.create(pod_id, "weights-0", 100_000) as segment:
        state = segment.path.stat()
        assert segment.path == Path(f"/dev/shm/tandem-{pod_id}-{os.getpid()}-weights-0")
        assert state.st_blocks * 512 >= segment.size_bytes >= 100_000 and state.st_mode & 0o777 == 0o600
        with Segment.open(segment.name) as reader:
            segment.memory[70_000] = 7
            assert reader.memory[70_000] == 7 and reader.size_bytes == segment.size_bytes
    assert not segment.path.exists()


def test_what_a_reader_writes_stays_with_the_reader(pod_id):
    with Segment.create(pod_id, "weights-0", 4096) as segment:
        segment.memory[0] = 1
        with start("scribble", segment.name) as reader:
            assert reader.stdout.read() == "99\n"
        assert segment.memory[0] == 1


def test_touching_maps_every_page_and_changes_none(pod_id):
    with Segment.create(pod_id, "weights-0", 64 * mmap.PAGESIZE) as segment:
        segment.memory[5] = 5
        segment.touch()
        with Segment.open(segment.name) as reader:
            reader.touch()
            segment.memory[5 + mmap.PAGESIZE] = 6
            assert (reader.memory[5], reader.memory[5 + mmap.PAGESIZE]) == (5, 6)


def test_a_full_folder_is_one_line_and_leaves_nothing(pod_id):
    with pytest.raises(RunError, match=r"shared memory /dev/shm is full: segment 'weights-0' needs .* GiB are free") as caught:
        Segment.create(pod_id, "weights-0", 2**50)
    assert "\n" not in str(caught.value) and not list(FOLDER.glob(f"tandem-{pod_id}-*"))


def test_of_two_buffers_both_are_made_or_neither(pod_id, monkeypatch):
    create = Segment.create.__func__

    def only_the_first_fits(cls, pod, name, size, folder=FOLDER):
        return create(cls, pod, name, size if name == "weights-0" else 2**50, folder)

    monkeypatch.setattr(Segment, "create", classmethod(only_the_first_fits))
    with pytest.raises(RunError, match="'weights-1' needs"):
        WeightBuffers.create(pod_id, 4096)
    assert not list(FOLDER.glob(f"tandem-{pod_id}-*"))


def test_a_segment_is_made_once(pod_id):
    with Segment.create(pod_id, "a", 10), pytest.raises(RunError, match="File exists"):
        Segment.create(pod_id, "a", 10)


def test_a_segment_that_is_gone_is_told_from_other_errors():
    with pytest.raises(FileNotFoundError):
        Segment.open("tandem-nobody-1-weights-0")


def test_the_buffers_take_turns(pod_id):
    buffers = WeightBuffers.create(pod_id, 10)
    first, second = buffers.segments
    assert buffers.other(None) is first and buffers.other(first.name) is second and buffers.other(second.name) is first
    assert buffers.other("tandem-pod-1-weights-1") is first
    buffers.close()
    buffers.close()


def test_a_sweep_takes_the_segments_of_the_dead_and_leaves_those_of_the_living(pod_id, tmp_path):
    with start("own", pod_id, FOLDER) as shim:
        names = shim.stdout.readline().split()
        assert len(names) == 2 and sweep(pod_id) == []
        assert all((FOLDER / name).exists() for name in names)
        os.kill(shim.pid, signal.SIGKILL)
    with Segment.create(pod_id, "mine", 10) as mine:
        assert sweep("another" + pod_id) == []
        assert sweep(pod_id) == sorted(names)
        assert not any((FOLDER / name).exists() for name in names) and mine.path.exists()


def test_a_sweep_leaves_an_owner_that_it_cannot_see(tmp_path):
    """A container that shares the folder has its own PID namespace, in which the owner's PID does not exist."""
    with start("own", "far", tmp_path) as shim:
        names = shim.stdout.readline().split()
        moved = tmp_path / names[0].replace(f"-{shim.pid}-", "-4194999-")
        (tmp_path / names[0]).rename(moved)
        assert sweep(folder=tmp_path) == [] and moved.exists()
        shim.kill()
    assert sweep(folder=tmp_path) == sorted([moved.name, names[1]])


def test_a_sweep_leaves_files_that_are_not_segments(tmp_path):
    (tmp_path / "tandem-notes.txt").write_text("mine")
    (tmp_path / "other-pod-1-weights-0").write_text("theirs")
    assert sweep(folder=tmp_path) == [] and len(list(tmp_path.iterdir())) == 2
