"""The job that ``tandem plan --emit`` prints is the one that the launcher would submit: strictly valid, with the layout of the plan."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kubernetes_schemas import check

from tandem.cli.main import main

Here = Callable[..., str]
SIZES = shlex.split("--hidden 4096 --layers 32 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --gpus 8 --dp 8")
DATA = ("--model.path=m", "--data.train=[{path: t}]")
RECIPE = "sort"


def without_comments(script: str) -> str:
    return "\n".join(line for line in script.splitlines() if not re.match(r"# .*(predicted|submits this)", line)).strip()


def kubernetes(tmp_path: Path) -> list[str]:
    keys = {"image": "127.0.0.1:1/tandem:0.1.0", "claim": "runs", "mount_path": str(tmp_path), "user_id": str(os.getuid() or 1000)}
    return [f"--kubernetes.{key}={value}" for key, value in keys.items()]


def test_the_batch_script_is_the_one_that_would_be_submitted(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # Without Slurm, whose partitions would be looked at.
    keys = ("--slurm.partition=gpu", "--slurm.time=0-08:00:00")
    script = here("plan", RECIPE, "--gpus", "16", "--dp", "16", "--emit", "slurm", "--recipe", "two-nodes.yaml", *keys)
    assert script.startswith("#!/bin/bash\n# DP 16, ")
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --partition=gpu", "#SBATCH --time=0-08:00:00"} <= set(script.splitlines())
    assert "#SBATCH --job-name=tandem-two-nodes" in script and "tandem.cluster.launch.slurm.job" in script.splitlines()[-1]
    assert without_comments(here("train", "two-nodes.yaml", "--on", "slurm", "--dry-run", *keys)) == without_comments(script)
    recipe = yaml.safe_load((tmp_path / "two-nodes.yaml").read_text())
    assert (recipe["parallel"]["data"], recipe["pods"]["trainer_count"], recipe["slurm"]["nodes"]) == (16, 2, 2)


def test_the_manifests_are_valid_and_ask_for_the_gpus_of_the_plan(here: Here, tmp_path: Path) -> None:
    printed = here("plan", RECIPE, "--gpus", "16", "--dp", "16", "--emit", "kubernetes", *kubernetes(tmp_path))
    made = list(yaml.safe_load_all(printed))
    for each in made:
        check(each)
    jobset = made[0]
    assert jobset["kind"] == "JobSet"
    pods = [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobset["spec"]["replicatedJobs"]]
    assert [pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == ["8", "8"]
    assert sum(job["replicas"] for job in jobset["spec"]["replicatedJobs"]) == 2


@pytest.mark.full
@pytest.mark.usefixtures("near_slurm")
def test_slurm_takes_the_script_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The launcher asks a real sbatch --test-only, which refuses what its cluster does not have.
    assert main(["plan", RECIPE, "--gpus", "1", "--dp", "1", "--emit", "slurm", "--slurm.gpus_per_node=", "--slurm.cpus_per_task=1"]) == 0
    assert "#SBATCH --nodes=1" in capsys.readouterr().out
    assert main(["plan", RECIPE, "--gpus", "8", "--dp", "8", "--emit", "slurm"]) != 0
    assert "gpus_per_node" in capsys.readouterr().err


def test_a_plan_of_two_nodes_has_a_run_on_data_train_on_both(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script is made without a Slurm.
    monkeypatch.setenv("PATH", str(tmp_path))
    printed = here("plan", *SIZES[:-4], "--gpus", "16", "--dp", "16", *DATA, "--emit", "slurm", "--recipe", "plan.yaml")
    assert "#SBATCH --nodes=2" in printed
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["pods"] == {"trainer_count": 2}
    # A replica on both nodes has its stages there.
    here("plan", *SIZES[:-4], "--gpus", "16", "--dp", "1", "--tp", "8", "--pp", "2", *DATA, "--emit", "slurm", "--recipe", "stages.yaml")
    made = yaml.safe_load((tmp_path / "stages.yaml").read_text())
    assert (made["pods"], made["parallel"]["data"], made["parallel"]["pipeline"]) == ({"trainer_count": 2}, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ([*SIZES, "--emit", "slurm"], "the job has no model.path; give a recipe, or --model.path=MODEL_FOLDER"),
        ([RECIPE, "--gpus", "8", "--dp", "8", "--emit", "kubernetes", "--kubernetes.user_id=1000"], "'kubernetes.image' is empty"),
        ([RECIPE, "--gpus", "12", "--dp", "3", "--tp", "4", "--global-batch", "12", "--emit", "slurm"], "--dp 3 does not divide over them"),
        ([RECIPE, "--gpus", "8", "--dp", "8", "--slurm.partition=gpu"], "keys of the recipe are for '--emit slurm'"),
        ([RECIPE, "--gpus", "8", "--dp", "8", "--emit", "slurm", "--slurm.partitoin=gpu"], "did you mean 'slurm.partition'?"),
        ([RECIPE, "--recipe", "x.yaml"], "--recipe is the file of the recipe that --emit prints or places"),
    ),
    ids=("no-model", "no-image", "replicas", "no-emit", "key", "recipe"),
)
def test_what_cannot_be_a_job_is_refused_in_one_line(arguments: list[str], message: str, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert message in here("plan", *arguments)
