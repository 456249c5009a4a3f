"""The runs of a job array of a real Slurm are runs of their own: shown, stopped and resumed one by one or all."""

import json

import pytest
from launched_runs import TINY, LaunchedRuns

pytestmark = pytest.mark.full


def states(slurm: LaunchedRuns, *names: str) -> list[str]:
    shown = slurm.tandem("status", *(f"runs/{name}" for name in names), "--json")
    return [json.loads(line)["state"] for line in shown.splitlines()]


def test_every_run_of_an_array_has_the_weights_of_the_same_run_here_and_a_name_and_a_log_of_its_own(slurm: LaunchedRuns) -> None:
    (slurm.folder / "sweep.yaml").write_text("runs:\n- {run.seed: 1}\n- {run.seed: 2}\n- {run.seed: 2, trainer.learning_rate: 0.001}\n")
    said = slurm.tandem("train", TINY, "--on", "slurm", "--array", "sweep.yaml", "--run.name=sweep", "--slurm.cpus_per_task=1")
    assert said.startswith("submitted job ") and "3 runs runs/sweep-0, runs/sweep-1, runs/sweep-2" in said
    names = ["sweep-0", "sweep-1", "sweep-2"]
    for name in names:
        assert slurm.wait_for_state(name, "finished", "failed", "stopped")["state"] == "finished", slurm.output(name)
    assert states(slurm, *names) == ["finished"] * 3
    shown = slurm.tandem("logs", *(f"runs/{name}" for name in names))
    assert [line for line in shown.splitlines() if line.startswith("== ")] == [f"== runs/{name}" for name in names] and shown.count("step 3: loss") == 3
    slurm.tandem("train", TINY, "--run.name=one", "--run.seed=2", "--trainer.learning_rate=0.001")
    assert slurm.model("one") == slurm.model("sweep-2") != slurm.model("sweep-1")


def test_an_array_waits_for_its_turn_and_is_cancelled_whole_and_one_of_its_runs_resumed(slurm: LaunchedRuns) -> None:
    (slurm.folder / "sweep.yaml").write_text("runs:\n- {run.seed: 1}\n- {run.seed: 2}\n")
    long = ("--run.max_steps=1000000", "--checkpoint.every_steps=100000")
    slurm.tandem("train", TINY, "--on", "slurm", "--array", "sweep.yaml", "--array-limit", "1", "--run.name=sweep", *long)
    slurm.wait_for_step("sweep-0", 3)
    assert states(slurm, "sweep-0", "sweep-1") == ["running", "queued"]
    # The name of a run is taken, and nothing of the second array stays.
    assert "sweep-0" in slurm.refusal("train", TINY, "--on", "slurm", "--array", "sweep.yaml", "--run.name=sweep", *long)
    said = slurm.tandem("cancel", "runs/sweep-0", "runs/sweep-1").splitlines()
    assert said[0].startswith("runs/sweep-0: asked job ") and said[1].startswith("runs/sweep-1: cancelled job ")
    for name in ("sweep-0", "sweep-1"):
        assert slurm.wait_for_state(name, "stopped", "failed")["state"] == "stopped", slurm.output(name)
    saved = slurm.status("sweep-0")["checkpoint"]
    assert saved >= 3
    slurm.tandem("resume", "runs/sweep-0", f"--run.max_steps={saved + 2}")
    assert slurm.wait_for_state("sweep-0", "finished", "failed", "stopped")["state"] == "finished", slurm.output("sweep-0")
    assert sorted(path.name for path in (slurm.folder / "runs").iterdir()) == ["sweep-0", "sweep-1"]
