"""Silent data corruption in runs on data, with the real command: a bit that a rank flips is found and named, and the run ends with the undisturbed weights."""

from pathlib import Path

import pytest
from data_runs import command, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.runtime.records.journal import Event, Journal

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
