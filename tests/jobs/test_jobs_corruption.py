"""Silent data corruption in runs on data, with the real command: a bit that a rank flips is found and named, and the run ends with the undisturbed weights."""

from pathlib import Path

import pytest
from data_runs import command, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.config.trainer import TrainerConfig
from tandem.runtime.records.journal import Event, Journal
from tandem.types import UserError

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


def run(folder: Path, data: Path, *arguments: str, rate: float = 1.0, status: int = 0) -> str:
    """Trains in ``folder``/run on two data-parallel ranks, with a check of ``rate`` of the micro-batches; returns the output."""
    write_recipe(
        folder, data,
        data={"train": [{"path": str(data / "json")}], "global_batch_size": 7},
        trainer={"micro_batch_tokens": 100, "corruption_check": rate}, evaluation={"every_steps": STEPS},
        checkpoint={"every_steps": 1, "keep": 2, "asynchronous": False}, run={"max_steps": STEPS}, parallel={"data": 2},
    )  # fmt: skip
    return command("train", "recipe.yaml", "--machine.threads=1", *arguments, status=status, folder=folder)


def events(folder: Path, *kinds: str) -> list[Event]:
    with Journal(folder / "run" / "journal.sqlite", read_only=True) as journal:
        return [event for event in journal.events() if event.kind in kinds]


def weights(folder: Path) -> bytes:
    return (folder / "run" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def unchecked(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unchecked")
    run(folder, data, rate=0.0)
    return folder


@pytest.mark.full
def test_a_run_whose_micro_batches_are_all_computed_twice_has_the_bits_of_one_without_the_check(data: Path, unchecked: Path, tmp_path: Path) -> None:
    run(tmp_path, data)
    assert weights(tmp_path) == weights(unchecked) and rows(tmp_path / "run") == rows(unchecked / "run")
    agreements = events(tmp_path, "corruption_check")
    assert [event.detail["step"] for event in agreements] == list(range(STEPS)) and not events(unchecked, "corruption_check")
    assert all(event.detail["micro_batches"] > 1 for event in agreements)


@pytest.mark.full
@pytest.mark.parametrize("place", ["gradient", "matmul"])
def test_one_flipped_bit_is_found_and_named_and_the_run_ends_with_the_undisturbed_weights(place: str, data: Path, unchecked: Path, tmp_path: Path) -> None:
    said = run(tmp_path, data, f"--fault=rank1:flip:{place}:3")
    [found] = events(tmp_path, "silent_corruption")
    assert "silent data corruption in step 3: rank 1 on" in said and "was right when it was repeated" in said
    assert found.detail["ranks"] == [1] and found.detail["step"] == 3 and not found.detail["is_persistent"]
    assert found.detail["last_agreement"] == 2 and found.detail["checkpoint"] == 2 and found.detail["suspect_checkpoints"] == [3]
    [cordon] = events(tmp_path, "cordon")
    assert cordon.detail["ranks"] == [1] and cordon.detail["host"] == found.detail["hosts"][0]
    assert weights(tmp_path) == weights(unchecked) and rows(tmp_path / "run") == rows(unchecked / "run")


@pytest.mark.full
def test_a_rank_that_is_wrong_again_stops_the_run_and_a_resume_ends_with_the_undisturbed_weights(data: Path, unchecked: Path, tmp_path: Path) -> None:
    said = run(tmp_path, data, f"--checkpoint.upload={tmp_path / 'copies'}", "--fault=rank1:flips:gradient:3", status=1)
    assert "is recorded as cordoned" in said and "tandem resume" in said
    [found] = events(tmp_path, "silent_corruption")
    assert found.detail["ranks"] == [0, 1] and found.detail["is_undecided"] and found.detail["checkpoint"] == 2
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "suspect-step-3").is_dir() and (folder / "step-2").is_dir() and not (folder / "step-3").exists()
    assert not (tmp_path / "copies" / "step-3" / "COMMIT").exists(), "no copy is taken for a checkpoint"
    command("resume", "run", folder=tmp_path)
    assert weights(tmp_path) == weights(unchecked) and rows(tmp_path / "run") == rows(unchecked / "run")
    assert (tmp_path / "copies" / f"step-{STEPS}" / "COMMIT").exists()


@pytest.mark.full
def test_the_checkpoint_of_the_last_agreement_is_kept_however_many_follow(data: Path, unchecked: Path, tmp_path: Path) -> None:
    # At this rate and seed steps are left out of the check.
    run(tmp_path, data, "--checkpoint.keep=1", rate=0.12)
    agreed = [event.detail["step"] for event in events(tmp_path, "corruption_check")]
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert 0 < len(agreed) < STEPS - 1 and agreed[-1] < STEPS - 1 and kept == [agreed[-1], STEPS]
    assert weights(tmp_path) == weights(unchecked)


def test_a_share_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'trainer.corruption_check' is 1.5; it must be between 0 \(off\) and 1"):
        TrainerConfig(corruption_check=1.5).check()
