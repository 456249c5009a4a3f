"""A trainer whose state is in a file during the rollout: the same bits, exact bytes in the journal, and memory freed for the engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pod_runs import PodRun, difference

from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe, load_config
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import sleeping_bytes
from tandem.jobs.checks.check_rl import check_rl_run
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.pod.states import TrainerState
from tandem.runtime.records.journal import Journal
from tandem.types import RunError


def details(run: PodRun, state: TrainerState) -> list[dict[str, Any]]:
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        return [transition.detail for transition in journal.transitions() if transition.state == state]


def model_bytes(run: PodRun) -> int:
    return sum(tensor.nbytes for _, tensor in read_tensors(run.directory / "model"))


def test_state_that_waits_in_a_file_changes_no_bit_and_the_journal_has_its_bytes(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--trainer.sleep_offload=nvme")
    assert done.returncode == 0, done.stderr
    assert difference(run, undisturbed) == []
    assert run.left_behind() == []
    weights = model_bytes(run)
    offloads, registers, onloads = (details(run, state) for state in (TrainerState.OFFLOAD, TrainerState.REGISTER, TrainerState.ONLOAD))
    # Before the first step there are no moments: the reference is offloaded first, then the weights. Afterwards two moments too.
    assert [offload["begun_bytes"] for offload in offloads] == [weights] + [3 * weights] * 6
    assert [offload["gradient_bytes"] for offload in offloads] == [0] + [weights] * 6
    assert [register["offload_bytes"] for register in registers] == [2 * weights] + [4 * weights] * 6
    assert sleeping_bytes(read_shapes(run.directory / "model"), TrainerConfig(sleep_offload="nvme"), ParallelConfig(), reference=True) == 4 * weights
    assert [onload["bytes"] for onload in onloads] == [2 * weights] + [4 * weights] * 5
    assert all(register["offload_seconds"] > 0 for register in registers) and all(onload["seconds"] > 0 for onload in onloads)
    assert list((run.directory / "offload").iterdir()) == [], "the file has no name"


def test_offload_to_the_memory_that_the_state_is_in_says_that_nothing_moves(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--trainer.sleep_offload=cpu", "--run.max_steps=2", "--sft.steps=3")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("sleep_offload is cpu, and the trainer's state is in the host's memory already: nothing moves") == 1
    assert all(detail["begun_bytes"] == 0 and "nothing moves" in detail["note"] for detail in details(run, TrainerState.OFFLOAD))
    assert all(detail["bytes"] == 0 for detail in details(run, TrainerState.ONLOAD))


def test_disk_without_room_for_offloaded_state_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = tmp_path / "away"
    away.mkdir()
    usage = shutil.disk_usage(tmp_path)

    def checked(*overrides: str) -> list[str]:
        settings = ("trainer.sleep_offload=nvme", f"run.directory={tmp_path}", *overrides)
        recipe = load_config(Path(__file__).parents[2] / "recipes" / "sort.yaml", [f"--{setting}" for setting in settings])
        assert isinstance(recipe, Recipe)
        return check_rl_run(recipe).lines()

    assert any(line.startswith("of them offloaded: ") for line in checked())
    assert any(line.endswith(f"MiB in '{away}'") for line in checked(f"trainer.offload_folder={away}"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=2**20 if Path(folder) == away else 2**50))
    checked()
    with pytest.raises(RunError, match=r"on the disk of '.*away' and 1 MiB are free; make room, or name another 'trainer\.offload_folder'"):
        checked(f"trainer.offload_folder={away}")


@pytest.mark.full
@pytest.mark.parametrize("mesh", [
    "--parallel.data=2", "--parallel.data=2 --parallel.zero=2", "--parallel.data=2 --parallel.zero=3",
    "--parallel.tensor=2 --trainer.optimizer=muon", "--parallel.data=2 --parallel.zero=1 --trainer.optimizer=adamw8bit",
])  # fmt: skip
def test_state_of_ranks_waits_in_files_and_changes_no_bit(mesh: str, tmp_path: Path) -> None:
    few = ("--model.create.num_key_value_heads=2", "--run.max_steps=3", "--sft.steps=6", *mesh.split())
    stays, sleeps = PodRun(tmp_path, name="stays"), PodRun(tmp_path, name="sleeps")
    for run, value in ((stays, "none"), (sleeps, "nvme")):
        done = run.train(*few, f"--trainer.sleep_offload={value}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert difference(sleeps, stays) == []
    moved = [detail["offload_bytes"] for detail in details(sleeps, TrainerState.REGISTER)]
    assert moved[1:] == [moved[1]] * (len(moved) - 1) and moved[1] > moved[0] > 0
    onloaded = [detail["bytes"] for detail in details(sleeps, TrainerState.ONLOAD)]
    assert len(onloaded) >= 3 and onloaded == moved[: len(onloaded)]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["rollout_worker:after:update_weight:1", "trainer_worker:after:register:2"])
def test_a_death_while_the_state_is_in_a_file_changes_no_bit(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--trainer.sleep_offload=nvme", "--fault", fault)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(run.events("recovery")) == 1
    assert difference(run, undisturbed) == []


@pytest.mark.full
def test_resident_memory_of_the_trainer_falls_by_its_state_while_the_engine_works(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(
        "--trainer.sleep_offload=nvme", "--model.create.hidden_size=512", "--model.create.num_hidden_layers=8", "--model.create.num_attention_heads=8",
        "--model.create.head_dim=64", "--model.create.intermediate_size=2048", "--run.max_steps=2", "--sft.steps=3", "--checkpoint.asynchronous=false",
        "--evaluation.every_steps=10",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    weights = model_bytes(run)
    assert weights > 25e6 * 4
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    # Step 1 begins with weights, reference and two moments in the file.
    trained, waited = rows[0]["memory/train/measured"], rows[1]["memory/wait_rollout/measured"]
    assert trained - waited > 4 * weights, (trained, waited, weights)
