"""The batch script has what the recipe asks for, and what cannot be a script is refused in one line."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched_runs import TINY

from tandem.cluster.launch.record import Record, write_record
from tandem.cluster.launch.slurm.commands import Job, check_gpus
from tandem.cluster.launch.slurm.launcher import SlurmLauncher
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.slurm import SlurmConfig, SlurmRolloutConfig
from tandem.types import UserError

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
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
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


def test_nodes_of_another_kind_are_a_second_part_with_its_own_resources_and_the_time_of_the_first() -> None:
    rollout = SlurmRolloutConfig(nodes=6, partition="l40s", gpus_per_node="l40s:4", cpus_per_task=8, mem="64G")
    config = SlurmConfig(partition="h100", nodes=2, time="0-08:00:00", gpus_per_node="h100:8", account="lab", mem="900G", rollout=rollout)
    lines = batch_script(config, Path("/shared/runs/sort"), Path("/shared")).splitlines()
    first, second = lines[: lines.index("#SBATCH hetjob")], lines[lines.index("#SBATCH hetjob") + 1 :]
    assert first[-9:] == [
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --partition=h100", "#SBATCH --time=0-08:00:00", "#SBATCH --account=lab",
        "#SBATCH --gpus-per-node=h100:8", "#SBATCH --mem=900G", "#SBATCH --requeue", "#SBATCH --exclusive",
    ]  # fmt: skip
    assert second[: second.index("")] == [
        "#SBATCH --nodes=6", "#SBATCH --ntasks-per-node=1", "#SBATCH --partition=l40s", "#SBATCH --time=0-08:00:00", "#SBATCH --account=lab",
        "#SBATCH --cpus-per-task=8", "#SBATCH --gpus-per-node=l40s:4", "#SBATCH --mem=64G", "#SBATCH --requeue",
    ]  # fmt: skip
    assert lines.count("#SBATCH hetjob") == 1 and lines[-1].startswith("exec ")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("rollout.nodes=-1", "'slurm.rollout.nodes' is -1; give a number of nodes, or 0"),
        ("rollout={mem: 64G}", "'slurm.rollout.mem' is '64G', which is not read: slurm.rollout.nodes is 0; set slurm.rollout.nodes"),
        ("rollout={nodes: 1, mem: 6 G}", "'slurm.rollout.mem' is '6 G'; it must be one word"),
        ("rollout={nodes: 1, cpus_per_task: -1}", "'slurm.rollout.cpus_per_task' is -1; give a number of cores"),
        ("rollout.nodes=1", "'slurm.rollout.nodes' is 1, and a run on data draws no samples"),
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


def test_a_run_that_ends_while_slurm_is_asked_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(TINY.read_text())
    write_record(tmp_path, Record("slurm", job="7"))
    has_result = False

    def find_job(job: str) -> Job | None:
        # The result is written, and the job has ended, between two questions.
        nonlocal has_result
        has_result = True
        return answers.pop()

    answers = [None, Job("COMPLETED", "n1", "0:10", "1:00", "None", 0)]
    monkeypatch.setattr("tandem.cluster.launch.slurm.launcher.find_job", find_job)
    monkeypatch.setattr("tandem.cluster.launch.slurm.launcher.finished_result", lambda recipe, directory: object() if has_result else None)
    while answers:
        has_result = False
        assert SlurmLauncher().status(tmp_path).state == "finished"


def test_gpus_are_counted_as_slurm_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "n1|gpu:h100:8(S:0-1)\nn2|gpu:h100:4,gpu:a100:4\nn3|gpu:2,craynetwork:1\nn4|(null)\n"
    monkeypatch.setattr("tandem.cluster.launch.slurm.commands.ask", lambda *command, stdin=None: said)
    check_gpus("", "8", 2)
    check_gpus("", "h100:4", 2)
    check_gpus("gpu", "2", 3)
    with pytest.raises(UserError, match=re.escape("'8', and 2 nodes of this cluster have 8 GPUs (the most is 8), where 3 are asked for")):
        check_gpus("", "8", 3)
    with pytest.raises(UserError, match=re.escape("'a100:8', and 0 nodes of partition 'gpu' have 8 GPUs of type 'a100' (the most is 4)")):
        check_gpus("gpu", "a100:8", 1)


def test_an_array_is_one_script_and_a_run_for_each_of_its_overrides(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sweep.yaml").write_text("runs:\n- {run.seed: 1, trainer.learning_rate: 0.002}\n- {run.seed: 2}\n")
    lines = here("train", TINY, "--on", "slurm", "--dry-run", "--array", "sweep.yaml", "--array-limit", "1", "--run.name=sweep").splitlines()
    assert {"#SBATCH --array=0-1%1", "#SBATCH --job-name=tandem-sweep", f"#SBATCH --output={tmp_path}/runs/sweep-%a/logs/slurm-%A.out"} <= set(lines)
    assert lines[-3:] == [
        f'exec {sys.executable} -m tandem.cluster.launch.slurm.job {tmp_path}/runs/sweep-"$SLURM_ARRAY_TASK_ID"',
        "# sweep-0: --run.seed=1 --trainer.learning_rate=0.002", "# sweep-1: --run.seed=2",
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        ("runs: []", "", "'sweep.yaml' has 0 runs; give 1 to 10000"),
        ("runs: [1]", "", "'sweep.yaml' has no list of runs; write 'runs:' and a line for each"),
        ("- {run.seed: 1}", "", "'sweep.yaml' has no runs; write 'runs:' and a line for each"),
        ("runs: [{run.name: a}]", "", "run 0 of 'sweep.yaml' sets 'run.name', which is numbered; give it with the command"),
        ("runs: [{run.seed: 1}, {slurm.nodes: 2}]", "", "run 1 of 'sweep.yaml' sets 'slurm', for which all runs of an array ask together"),
        ("runs: [{run.seed: 1}, {trainer.learning_rat: 2}]", "", "run 1 of the array: unknown key 'trainer.learning_rat'"),
        ("runs: [{run.seed: 1}]", "--array-limit -1", "--array-limit is -1; it must be between 0 (all at once) and 10000"),
        ("runs: [{run.seed: 1}]", "--on ray", "--array is for --on slurm, and this run is --on ray; start the runs one by one"),
    ],
)
def test_what_cannot_be_an_array_is_refused(here: Here, tmp_path: Path, text: str, arguments: str, line: str) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    assert here("train", TINY, "--on", "slurm", "--dry-run", "--array", "sweep.yaml", *arguments.split()).startswith(line)
    assert not (tmp_path / "runs").exists()
