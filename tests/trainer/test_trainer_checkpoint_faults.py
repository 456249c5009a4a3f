"""The newest whole checkpoint is found, whichever rank dies at whatever moment, and whatever happens to the files."""

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import newest_whole, prune
from tandem.trainer.checkpoint.format.shard import Key, Shard
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.write import PHASES
from tandem.types import RunError

ALONE = Communicator("world", 0, 1, None, 60.0)
RANKS = 2


def rows(step: int, rank: int) -> Shard:
    """Returns rank ``rank``'s half of the rows of the one tensor of step ``step``."""
    values = torch.arange(4000, dtype=torch.float32).view(8, 500) * step
    return Shard(Key("weights", "x"), (8, 500), ShardOffsets((4 * rank, 0), (4 * rank + 4, 500)), values[4 * rank : 4 * rank + 4].clone())


def content(folder: Path, step: int) -> torch.Tensor:
    found = newest_whole(folder, ALONE)
    assert found is not None and found.step == step
    target = Shard(Key("weights", "x"), (8, 500), ShardOffsets((0, 0), (8, 500)), torch.empty(8, 500))
    Contents(found.folder, found.manifest).read([target])
    return target.tensor


# Started once, and each case forks its ranks: importing torch takes seconds, and there are dozens of cases.
FORKS = """
import os, signal, sys, tempfile
from pathlib import Path
import torch, torch.distributed as dist
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from test_trainer_checkpoint_faults import RANKS, rows
from tandem.runtime.collectives.communicator import connect
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.types import RunError

def rank_process(rank, folder, store, step, victim, at):
    def point(name):
        if rank == victim and name == at:
            os.kill(os.getpid(), signal.SIGKILL)
    ranks = connect("world", rank, RANKS, dist.FileStore(store, RANKS), torch.device("cpu"), 30.0)
    checkpointer = Checkpointer(folder, 2, ranks, {"data": RANKS}, fault_point=point)
    try:
        checkpointer.save(step, [rows(step, rank)], {"updates": step}, companions=[folder.parent / "config.json"])
        checkpointer.wait()
    except RunError as error:
        print(f"rank {rank}: {error}", flush=True)
        return 1
    return 0

def run(folder, step, victim=None, at=None):
    with tempfile.TemporaryDirectory() as store:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                code = 9
                try:
                    code = rank_process(rank, folder, store + "/store", step, victim, at)
                finally:
                    os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

for line in sys.stdin:
    folder, step, victim, at = line.split()
    print(*run(Path(folder), int(step), None if victim == "-" else int(victim), at), flush=True)
"""

POINTS = ["after:checkpoint_stage", *(f"{when}:checkpoint_{phase}" for phase in PHASES for when in ("before", "after")), "after:checkpoint_prune"]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory if possible: hundreds of flushes to a disk take long."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.full
def test_rank_killed_at_any_phase_loses_nothing_and_the_next_save_goes_through(memory: Path) -> None:
    (memory / "config.json").write_text("{}")
    forks = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, str(Path(__file__).parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert forks.stdin is not None and forks.stdout is not None

    def run(folder: Path, step: int, victim: str = "-", at: str = "-") -> tuple[list[int], list[str]]:
        print(folder, step, victim, at, file=forks.stdin, flush=True)
        said = []
        for line in forks.stdout:
            if not line.startswith("rank"):
                return [int(word) for word in line.split()], said
            said.append(line)
        raise AssertionError("the processes have ended")

    try:
        whole = memory / "whole"
        assert run(whole, 1) == ([0, 0], [])
        for number, (point, victim) in enumerate(itertools.product(POINTS, range(RANKS))):
            folder = memory / str(number)
            shutil.copytree(whole, folder)
            codes, said = run(folder, 2, str(victim), f"{point}:2")
            assert codes[victim] == -9, f"{point} is a point that rank {victim} passes"
            assert all(line.count("\n") == 1 for line in said)
            found = newest_whole(folder, ALONE)
            assert found is not None
            if point in ("after:checkpoint_verify", "before:checkpoint_commit") and victim == 1:
                assert found.step in (1, 2), "rank 1 has voted for it: rank 0 commits or hears of the death first"
            else:
                assert found.step == (2 if point in ("after:checkpoint_commit", "after:checkpoint_prune") else 1)
            assert torch.equal(content(folder, found.step), torch.cat([rows(found.step, rank).tensor for rank in range(RANKS)]))
            assert run(folder, 3) == ([0, 0], [])
            assert torch.equal(content(folder, 3), torch.cat([rows(3, rank).tensor for rank in range(RANKS)]))
            assert sorted(path.name for path in folder.iterdir()) == [f"step-{found.step}", "step-3"], "remnants are removed"
    finally:
        forks.kill()
        forks.wait()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two checkpoints with two files for each of two ranks, written by one process."""
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, 2, ALONE, {"data": 1}, asynchronous=False)
    for step in (4, 5):
        checkpointer.save(step, [rows(step, 0), rows(step, 1)], {"updates": step}, {"random": "x"}, [tmp_path / "config.json"])
    checkpointer.close()
    return folder


FILES = ["COMMIT", "MANIFEST.json", "rank-00000.json", "rank-00000.safetensors", "config.json"]


def flipped(at: float) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(at * len(data)))] ^= 1
        path.write_bytes(data)

    return harm


HARMS: dict[str, Callable[[Path], object]] = {
    "first byte": flipped(0), "middle byte": flipped(0.5), "last byte but one": flipped(0.999), "cut short": lambda p: os.truncate(p, p.stat().st_size - 1),
    "emptied": lambda p: os.truncate(p, 0), "longer": lambda p: p.write_bytes(p.read_bytes() + b" "), "removed": Path.unlink,
    "of the one before": lambda p: shutil.copyfile(p.parent.parent / "step-4" / p.name, p),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_any_harm_to_any_file_is_seen_and_the_one_before_is_taken(two: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = (two / "step-5" / name).read_bytes()
    assert torch.equal(content(two, 5), torch.cat([rows(5, rank).tensor for rank in range(2)]))
    for what, harm in HARMS.items():
        harm(two / "step-5" / name)
        if (two / "step-5" / name).exists() and (two / "step-5" / name).read_bytes() == saved:
            assert (what, name) == ("of the one before", "config.json"), "the same file in both"
            continue
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(content(two, 4), torch.cat([rows(4, rank).tensor for rank in range(2)])), what
        assert "step-5' is skipped" in caplog.text and len(caplog.messages) == 1 and "\n" not in caplog.messages[0]
        (two / "step-5" / name).write_bytes(saved)
    assert newest_whole(two, ALONE).step == 5  # type: ignore[union-attr]


def test_files_of_two_ranks_that_are_swapped_are_seen(tmp_path: Path) -> None:
    """Both files are whole and of the same size, but swapped."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        checkpointer = Checkpointer(folder, 5, ALONE, {}, asynchronous=False)
        checkpointer.save(step, [rows(step, 0)], {})
        checkpointer.close()
    newest = folder / "step-2"
    # The files of a second rank, made from the first's, so that the two can be swapped.
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    index = json.loads((newest / "rank-00000.json").read_text())
    from tandem.storage.digests import bytes_digest
    from tandem.trainer.checkpoint.format.manifest import marker_of

    shutil.copyfile(newest / "rank-00000.safetensors", newest / "rank-00001.safetensors")
    index |= {"rank": 1, "file": "rank-00001.safetensors", "own": {"random": 1}}
    data = (json.dumps(index) + "\n").encode()
    (newest / "rank-00001.json").write_bytes(data)
    manifest["indexes"].append(["rank-00001.json", len(data), bytes_digest(data)])
    (newest / "MANIFEST.json").write_text(json.dumps(manifest))
    (newest / "COMMIT").write_bytes(marker_of((newest / "MANIFEST.json").read_bytes()))
    assert newest_whole(folder, ALONE).step == 2  # type: ignore[union-attr]
    (newest / "rank-00001.json").rename(newest / "x")
    (newest / "rank-00000.json").rename(newest / "rank-00001.json")
    (newest / "x").rename(newest / "rank-00000.json")
    assert newest_whole(folder, ALONE).step == 1  # type: ignore[union-attr]


def test_damage_that_comes_between_the_look_and_the_reading_is_refused(two: Path) -> None:
    found = newest_whole(two, ALONE)
    assert found is not None
    contents = Contents(found.folder, found.manifest)
    flipped(0.9)(found.folder / "rank-00000.safetensors")
    with pytest.raises(RunError, match=r"does not have the digest it was written with at bytes 0 to \d+"):
        contents.read([Shard(Key("weights", "x"), (8, 500), ShardOffsets((0, 0), (8, 500)), torch.empty(8, 500))])


def test_full_file_system_is_one_line_and_both_checkpoints_before_stay(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("128k")
    checkpointer = Checkpointer(disk / "checkpoints", 9, ALONE, {})
    for step in range(1, 20):
        with_room = step < 5
        try:
            checkpointer.save(step, [rows(step, 0), rows(step, 1)], {})
            checkpointer.wait()
            last = step
        except RunError as error:
            assert "no space left" in str(error) and "MiB free" in str(error) and "\n" not in str(error) and not with_room
            break
    checkpointer.close()
    assert step > 4
    assert torch.equal(content(disk / "checkpoints", last), torch.cat([rows(last, rank).tensor for rank in range(2)]))
    assert len(list((disk / "checkpoints").iterdir())) == last


def test_pruning_counts_only_what_is_committed(two: Path) -> None:
    shutil.copytree(two / "step-5", two / "step-6")
    (two / "step-6" / "COMMIT").unlink()
    assert prune(two, keep=1) == [4]
    assert sorted(path.name for path in two.iterdir()) == ["step-5", "step-6"]
