"""Plans of a pod's residents on meshes: every rank has a file of its own for what it holds, and no bit changes."""

from pathlib import Path

import pytest
from pod_runs import PodRun, difference

from tandem.runtime.records.journal import Journal


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "plan"), [
    ("--parallel.data=2", "terminate"), ("--parallel.data=2 --parallel.zero=2", "figure"), ("--parallel.data=2 --parallel.zero=3", "figure"),
    ("--parallel.data=2 --parallel.zero=3", "terminate"), ("--parallel.tensor=2 --trainer.optimizer=muon", "figure"),
    ("--parallel.pipeline=2", "terminate"), ("--parallel.data=2 --parallel.zero=1 --trainer.optimizer=adamw8bit", "offload"),
])  # fmt: skip
def test_residents_of_ranks_wait_in_files_and_change_no_bit(mesh: str, plan: str, tmp_path: Path) -> None:
    few = ("--model.create.num_key_value_heads=2", "--run.max_steps=3", "--sft.steps=6", *mesh.split())
    stays, moved = PodRun(tmp_path, name="stays"), PodRun(tmp_path, name="moved")
    for run, value in ((stays, "keep"), (moved, plan)):
        done = run.train(*few, f"--residents.plan={value}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert difference(moved, stays) == [] and moved.events("residue") == []
    with Journal(moved.directory / "journal.sqlite", read_only=True) as journal:
        moves = [(one["resident"], one["move"], one["bytes"]) for each in journal.transitions() for one in each.detail.get("moves", [])]
    for name in ("actor", "optimizer"):
        away, back = ([size for held, move, size in moves if (held, move) == (name, wanted)] for wanted in ("offload", "reload"))
        assert away and set(away[1:]) == {away[-1]} and set(back) <= set(away), (name, away, back)
