import mmap
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tandem.types import RunError
from tandem.weight_transfer.shared_memory import FOLDER, Segment, WeightBuffers

HELPER = str(Path(__file__).parent / "helpers_weights.py")


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, HELPER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def pod_id():
    return "test" + uuid.uuid4().hex[:8]


def test_a_segment_has_its_pages_for_its_owner_only_and_no_name_in_the_folder(pod_id):
    with Segment.create(pod_id, "weights-0", 100_000) as segment:
        descriptor, inode = map(int, segment.name.removeprefix(f"tandem-{pod_id}-{os.getpid()}-weights-0-").split("-"))
        state = os.fstat(descriptor)
        assert (state.st_ino, state.st_nlink, state.st_dev) == (inode, 0, FOLDER.stat().st_dev)
        assert state.st_blocks * 512 >= segment.size_bytes >= 100_000 and state.st_mode & 0o777 == 0o600
        with Segment.open(segment.name) as reader:
            segment.memory[70_000] = 7
            assert reader.memory[70_000] == 7 and reader.size_bytes == segment.size_bytes
    with pytest.raises(FileNotFoundError):
        Segment.open(segment.name)


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
    assert "\n" not in str(caught.value)


def test_of_two_buffers_both_are_made_or_neither(pod_id, monkeypatch):
    create = Segment.create.__func__

    def only_the_first_fits(cls, pod, name, size, folder=FOLDER):
        return create(cls, pod, name, size if name == "weights-0" else 2**50, folder)

    monkeypatch.setattr(Segment, "create", classmethod(only_the_first_fits))
    before = open_segments(os.getpid())
    with pytest.raises(RunError, match="'weights-1' needs"):
        WeightBuffers.create(pod_id, 4096)
    assert open_segments(os.getpid()) == before


def open_segments(pid: int) -> int:
    """Returns the number of unnamed files of /dev/shm that a process has open."""
    links = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()}
    return sum(link.startswith("/dev/shm/#") for link in links)


def test_a_segment_that_has_ended_is_told_from_other_errors_and_from_a_later_file_with_its_number(pod_id):
    with Segment.create(pod_id, "weights-0", 10) as segment:
        name = segment.name
    descriptor = int(name.split("-")[-2])
    ends = os.pipe()
    os.dup2(ends[0], descriptor)
    try:
        for ended in (name, name.replace(f"-{os.getpid()}-", "-4194303-"), "tandem-pod-1-weights-0"):
            with pytest.raises(FileNotFoundError):
                Segment.open(ended)
    finally:
        [os.close(end) for end in {*ends, descriptor}]


def test_the_buffers_take_turns(pod_id):
    buffers = WeightBuffers.create(pod_id, 10)
    first, second = buffers.segments
    assert buffers.other(None) is first and buffers.other(first.name) is second and buffers.other(second.name) is first
    assert buffers.other("tandem-pod-1-weights-1") is first
    buffers.close()
    buffers.close()


def test_the_memory_of_an_owner_that_is_killed_is_free_at_once_and_a_reader_keeps_what_it_has_open(pod_id):
    size = 64 << 20
    with start("own", pod_id, size) as shim:
        names = shim.stdout.readline().split()
        assert not list(FOLDER.glob(f"*{pod_id}*")) and open_segments(shim.pid) == 2
        with Segment.open(names[0]) as reader:
            os.kill(shim.pid, signal.SIGKILL)
            shim.wait()
            assert bytes(reader.memory[:4]) == bytes(4)
            with pytest.raises(FileNotFoundError):
                Segment.open(names[1])
    assert [path for path in Path("/proc").glob("[0-9]*/fd/*") if is_of(path, names)] == []


def is_of(path: Path, names: list[str]) -> bool:
    """Returns whether a process has one of the segments ``names`` open at ``path``."""
    try:
        state = path.stat()
    except OSError:
        return False
    return state.st_dev == FOLDER.stat().st_dev and str(state.st_ino) in {name.split("-")[-1] for name in names}
