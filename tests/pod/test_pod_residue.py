"""What is left after each switch of a run, as the kernel's tables say it from outside: shared memory and files exactly, private memory within 32 MiB."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pod_runs import HERE, PodRun
from watched_memory import SHARED

from tandem.model.huggingface.model_folder import read_tensors

MIB = 2**20
MOST_LEFT = 32 * MIB
WIDE = (
    "--model.create.hidden_size=512", "--model.create.num_hidden_layers=8", "--model.create.num_attention_heads=8", "--model.create.head_dim=64",
    "--model.create.intermediate_size=2048", "--sft.steps=3", "--checkpoint.asynchronous=false", "--evaluation.every_steps=10",
)  # fmt: skip
Row = dict[str, Any]


def watched(folder: Path, *settings: str) -> tuple[PodRun, list[Row]]:
    """A run, and what its processes held at each moment."""
    run = PodRun(folder, program=(str(HERE / "watched_memory.py"), str(folder / "held.jsonl")))
    done = run.train(*settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return run, [json.loads(line) for line in (folder / "held.jsonl").read_text().splitlines()]


def model_bytes(run: PodRun) -> int:
    return sum(tensor.nbytes for _, tensor in read_tensors(run.directory / "model"))


def of_role(row: Row, role: str) -> list[Row]:
    return [process for process in row["processes"].values() if process["role"] == role]


def unnamed(row: Row, folder: str) -> Iterator[tuple[str, Row]]:
    """Yields every file without a name that a process has open in ``folder``, with the role of the process."""
    for process in row["processes"].values():
        yield from ((process["role"], file) for file in process["files"] if file["file"].startswith(folder) and file["file"].endswith("(deleted)"))


def check_shared_memory(rows: list[Row], weights: int, engine_ends: bool) -> None:
    """Exactly two segments exist from the first switch to the end, the same two, as large as the weights; an ended engine has neither open nor mapped."""
    switches = [row for row in rows if row["moment"] in ("waits", "trains")]
    first = {file["inode"] for _, file in unnamed(switches[0], SHARED)}
    assert len(first) == 2
    for row in switches:
        held = list(unnamed(row, SHARED))
        assert {file["inode"] for _, file in held} == first, "a segment was added or replaced"
        # Allocated in whole pages, of 2 MiB at most, and a page for the label.
        assert all(weights <= file["bytes"] <= file["allocated"] + 4096 and file["allocated"] <= weights + 4 * MIB for _, file in held)
        assert not [file for process in of_role(row, "other") for file in process["files"] if file["file"].startswith(SHARED)], "a reward worker has it open"
        if row["moment"] == "trains":
            assert len(of_role(row, "engine")) == (0 if engine_ends else 1), "the engine's process"


def check_files(rows: list[Row], run: PodRun, saved: int) -> None:
    """The files of the run's folder are the same after every step but for checkpoints; what residents were saved to is one file without a name, which
    holds ``saved`` bytes and does not grow (0: there is none)."""
    switches = [row for row in rows if row["moment"] == "trains" and row["step"] > 0]
    assert len(switches) >= 2

    def names(row: Row) -> set[str]:
        return {name for name in row["files"] if not name.startswith(("checkpoints/", "pod/rollout-")) and "-wal" not in name and "-shm" not in name}

    for row in switches:
        assert names(row) == names(switches[0]), names(row) ^ names(switches[0])
        assert not [name for name in row["files"] if "tmp" in name or name.rpartition("/")[2].startswith(".")]
        offloaded = list(unnamed(row, f"{run.directory}/"))
        assert {role for role, _ in offloaded} <= {"trainer"} and len(offloaded) == (1 if saved else 0)
        assert all(saved <= file["allocated"] <= saved + 4 * MIB for _, file in offloaded)
        assert [file["allocated"] for _, file in offloaded] == [file["allocated"] for _, file in unnamed(switches[0], f"{run.directory}/")], "it grows"


def staged(row: Row) -> int:
    """The memory that checkpoints are copied to before they are written, which is kept: as large as the largest rank file."""
    return max((size for name, size in row["files"].items() if name.startswith("checkpoints/") and name.endswith(".safetensors")), default=0)


@pytest.mark.full
def test_an_ended_engine_leaves_nothing_and_files_and_shared_memory_do_not_grow(tmp_path: Path) -> None:
    run, rows = watched(tmp_path, "--residents.plan=figure", "--run.max_steps=3", "--sft.steps=3", "--evaluation.every_steps=10")
    weights = model_bytes(run)
    moments = [(row["moment"], row["step"]) for row in rows if row["moment"] in ("waits", "trains")]
    assert moments[:4] == [("waits", 0), ("trains", 0), ("waits", 1), ("trains", 1)]
    check_shared_memory(rows, weights, engine_ends=True)
    check_files(rows, run, 4 * weights)
    assert run.events("residue") == [] and run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("plan", ["sleep", "figure", "terminate"])
def test_after_every_switch_what_should_be_gone_is_gone(plan: str, tmp_path: Path) -> None:
    ahead = () if plan == "sleep" else ("--residents.prefetch=false",)
    run, rows = watched(tmp_path, f"--residents.plan={plan}", *WIDE, *ahead)
    weights = model_bytes(run)
    assert weights > 100 * MIB
    check_shared_memory(rows, weights, engine_ends=plan != "sleep")
    # Actor, two moments, and the reference unless it is built again from its folder.
    check_files(rows, run, {"sleep": 0, "figure": 4 * weights, "terminate": 3 * weights}[plan])
    assert run.events("residue") == []
    (started,) = {process["private"] for row in rows if row["moment"] == "trainer_started" for process in of_role(row, "trainer")}
    waits, trains = ([row for row in rows if row["moment"] == moment] for moment in ("waits", "trains"))
    trainers = {moment: [of_role(row, "trainer")[0]["private"] - staged(row) for row in every] for moment, every in (("waits", waits), ("trains", trains))}
    if plan == "sleep":
        # The engine's process stays. It computes with the weights of the shared segment, so it has none of its own, asleep or awake.
        asleep, awake = ([of_role(row, "engine")[0]["private"] for row in every] for every in (trains, waits))
        assert max(*asleep, *awake) - min(*asleep, *awake) <= MOST_LEFT, (asleep, awake)
        # The trainer keeps actor, two moments and the reference; gradients are gone.
        assert all(size - started <= 4 * weights + MOST_LEFT for size in trainers["waits"]), (trainers, started)
        return
    # The trainer waits with what it had before it held any model, and the copy that checkpoints are written from.
    assert all(size - started <= MOST_LEFT for size in trainers["waits"]), (trainers, started)
    # It infers with the reference alone.
    assert all(abs(size - started - weights) <= MOST_LEFT for size in trainers["trains"]), (trainers, started)
