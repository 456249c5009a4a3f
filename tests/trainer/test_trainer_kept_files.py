"""The files of a keeper in a folder of its node outlive its process, killed by the kernel, and nothing else does: what was not committed, what another run has,
and what a run that has finished leaves."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.runtime.rpc.credentials import new_credential
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcess
from tandem.trainer.checkpoint.memory.keepers import PIECE_BYTES, Keepers
from tandem.trainer.checkpoint.memory.kept_files import KEEP_S, KeptFiles
from tandem.types import RunError

CREDENTIAL = new_credential()
DATA = bytes(range(256)) * 5 + b"end"
LARGE = os.urandom(PIECE_BYTES + 12345)


class Node:
    """A keeper whose files are in a folder, as the trainer of a run calls it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder / "kept"
        self.process = KeeperProcess("a", folder, CREDENTIAL, host=host, kept_in=str(self.folder), run="sort")

    def reached(self, of: str = "sort-1", incarnation: int = 1) -> Keepers:
        settings = {"keepers": [self.process.start()], "credential": CREDENTIAL, "nodes": [self.process.host], "of": of, "incarnation": incarnation}
        return Keepers.of(settings, 0)

    def kill(self) -> None:
        worker = self.process._worker
        assert worker is not None and worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        while worker.alive:
            time.sleep(0.01)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("sort/*"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.process.close()


def test_what_was_committed_is_there_after_a_kill_for_its_run_alone_and_nothing_after_its_end(node: Node, tmp_path: Path) -> None:
    keepers = node.reached()
    for step in (1, 2, 3):
        keepers.put(step, {"rank-00000.safetensors": LARGE if step == 3 else DATA, "rank-00000.json": DATA, "empty": b""})
        keepers.commit(step, {"manifest.json": DATA, MARKER: b"marker"})
    keepers.put(4, {"rank-00000.safetensors": DATA})
    # A second one of this machine has files of its own.
    other = Node(tmp_path)
    other.reached()
    assert node.folders() == ["node-127.0.0.1", "node-127.0.0.1.1"]
    other.process.close()
    node.kill()
    keepers = node.reached(incarnation=2)
    assert set(keepers.held()) == {2, 3} and set(node.process.held) == {2, 3}
    assert bytes(keepers.read(0, 3, "rank-00000.safetensors")) == LARGE and bytes(keepers.read(0, 3, "empty")) == b""
    assert bytes(keepers.read(0, 2, "rank-00000.json", offset=256, size=512)) == DATA[256:768]
    # Of a trainer that was replaced.
    with pytest.raises(RunError, match="no memory takes the checkpoint of step 5"):
        node.reached(incarnation=1).put(5, {"rank-00000.json": DATA})
    # A step that is taken again is none until it is committed again.
    keepers.put(3, {"rank-00000.json": DATA})
    node.kill()
    assert set(node.reached(incarnation=2).held()) == {2}
    assert node.reached(of="sort-2").held() == {}
    node.reached(of="sort-2").put(1, {"rank-00000.json": DATA})
    assert not (node.folder / "sort" / "node-127.0.0.1" / "step-2").exists()
    node.process.forget()
    assert not (node.folder / "sort" / "node-127.0.0.1").exists()


def test_what_a_keeper_left_behind_is_removed_after_a_day_by_the_next_one_of_any_run(node: Node) -> None:
    for name, age_s in (("old", KEEP_S + 60), ("new", KEEP_S - 60), ("sort", KEEP_S + 60)):
        folder = node.folder / name / "node-127.0.0.1"
        (folder / "step-1").mkdir(parents=True)
        for file in ("owner.json", "lock"):
            (folder / file).write_text("{}")
        os.utime(folder / "owner.json", times=(time.time() - age_s,) * 2)
    (node.folder / "sort" / "node-127.0.0.1" / "step-1" / MARKER).touch()
    keepers = node.reached(of="")
    assert sorted(path.name for path in node.folder.iterdir()) == ["new", "sort"] and node.process.held == {1: [MARKER]}
    # Its time begins with its newest checkpoint.
    keepers.commit(2, {MARKER: b"marker"})
    assert time.time() - (node.folder / "sort" / "node-127.0.0.1" / "owner.json").stat().st_mtime < KEEP_S


def test_a_file_system_that_is_full_takes_no_part_of_a_file_and_the_keeper_goes_on(small_disk: Callable[[str], Path]) -> None:
    kept = KeptFiles(Path("/dev/full"))
    with pytest.raises(RunError, match="cannot be made"):
        kept.make(1, "rank-00000.json", 10)
    disk = small_disk("64k")
    with pytest.raises(RunError, match=r"MiB cannot be made: No space left on device"):
        KeptFiles(disk).make(1, "rank-00000.json", 2**20)
    assert bytes(KeptFiles(disk).make(1, "rank-00000.json", 3)) == b"\0\0\0"
