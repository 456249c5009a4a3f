"""The batch script has what the recipe asks for, and what cannot be a script is refused in one line."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched_runs import TINY

from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.slurm import SlurmConfig

Here = Callable[..., str]
RL = Path(__file__).parents[1] / "pod" / "tiny.yaml"


def test_the_script_asks_for_what_the_recipe_says_and_ends_with_one_command() -> None:
    config = SlurmConfig(
        partition="gpu", nodes=4, time="0-08:00:00", cpus_per_task=16, gpus_per_node="h100:8", mem="512G", account="lab", signal_s=300, requeue=False,
        setup=("module load gcc", "export NCCL_SOCKET_IFNAME=ib0"), options=("--comment=two words", "--mail-type=END"),
    )  # fmt: skip
    assert batch_script(config, Path("/shared/runs/sort"), Path("/shared")).splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=tandem-sort",
        "#SBATCH --chdir=/shared",
        "#SBATCH --output=/shared/runs/sort/logs/slurm-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=0-08:00:00",
        "#SBATCH --account=lab",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --gpus-per-node=h100:8",
        "#SBATCH --mem=512G",
        "#SBATCH --no-requeue",
        '#SBATCH --comment="two words"',
        "#SBATCH --mail-type=END",
        "",
        "module load gcc",
        "export NCCL_SOCKET_IFNAME=ib0",
        "# The run in place of this shell, so that Slurm's signals reach it.",
        f"exec {sys.executable} -m tandem.cluster.launch.slurm.job /shared/runs/sort",
    ]


def test_a_run_asks_for_whole_nodes_and_to_be_queued_again_unless_it_says_otherwise() -> None:
    lines = batch_script(SlurmConfig(), Path("/r"), Path("/")).splitlines()
    assert "#SBATCH --requeue" in lines and "#SBATCH --exclusive" in lines and not [line for line in lines if "partition" in line or "time" in line]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("nodes=0", "'slurm.nodes' is 0; it must be at least 1"),
        ("time=8:00:00", "'slurm.time' is '28800', which may be minutes, or what YAML makes of HH:MM:SS; write the days first"),
        ("time=90", "'slurm.time' is '90', which may be minutes"),
        ("partition='a b'", "'slurm.partition' is 'a b'; it must be one word"),
        ("signal_s=0", "'slurm.signal_s' is 0"),
        ("cpus_per_task=-1", "'slurm.cpus_per_task' is -1"),
        ('setup=["a\\nb"]', "'slurm.setup' has 'a\\nb'; each item must be one line of shell"),
        ("options=[-p gpu]", "'slurm.options' has '-p gpu'; write options of sbatch in full"),
        ("options=[--nodes=3]", "'slurm.options' has '--nodes=3', which the launcher sets by slurm.nodes; leave it out"),
        ("options=[--array=1-3]", "'slurm.options' has '--array=1-3', which the launcher sets; leave it out"),
        ("partitoin=gpu", "unknown key 'slurm.partitoin'"),
    ],
)
def test_a_section_that_could_not_be_a_script_is_refused(here: Here, setting: str, line: str) -> None:
    assert here("train", TINY, "--on", "slurm", "--dry-run", f"--slurm.{setting}").startswith(line)


def test_without_the_commands_of_slurm_a_run_is_refused_and_its_script_is_shown(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert here("train", TINY, "--on", "slurm") == (
        "no 'sbatch' on the PATH, so there is no Slurm here; give the command on a login node of the cluster, or without '--on slurm'"
    )
    script = here("train", TINY, "--on", "slurm", "--dry-run")
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=tandem-tiny\n") and not (tmp_path / "runs").exists()


def test_several_nodes_without_an_etcd_to_start_are_refused(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.etcd_process.etcd_program", lambda: None)
    assert here("train", RL, "--on", "slurm", "--dry-run", "--slurm.nodes=2").startswith("a run on several machines needs etcd, and there is none on the PATH;")


def test_a_launcher_that_does_not_exist_is_refused_with_those_that_do(here: Here) -> None:
    assert re.search("invalid choice: 'torchx' .choose from 'local', 'slurm', ", here("train", TINY, "--on", "torchx"))
