"""Weights, gradients and activations in files, from a recipe: the rows, checkpoints and model have the bits of a run in memory, also after
a resume; and refusals."""

import shutil
from pathlib import Path

import pytest
import torch
from data_runs import rows
from test_jobs_numerics import begin, data  # noqa: F401 - a fixture too

from tandem.cli.main import main
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.estimate.model_bytes import weight_bytes
from tandem.estimate.processes import TRAINING_PROCESS_BYTES
from tandem.jobs.checks import check_run
from tandem.jobs.checks.check_data import check_data_run
from tandem.jobs.start import resume
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.new_model import folder_without_weights
from tandem.trainer.offload import activations
from tandem.types import RunError, UserError

PAGED = ("trainer.offload=nvme", "trainer.offload_parameters=nvme")
CHOICES = {
    "weights": PAGED,
    "weights and activations, layers computed again": (*PAGED, "trainer.offload_activations=nvme", "trainer.recompute=full"),
}
FILES = ("model/model.safetensors", "checkpoints/step-7/rank-00000.safetensors")


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    torch.set_num_threads(1)
    return begin(data, tmp_path_factory.mktemp("plain"), "data.held_out=" + str(data / "train"), "evaluation.every_steps=3")


@pytest.mark.parametrize("choice", CHOICES)
def test_offloaded_run_has_every_bit_of_one_in_memory_and_resumes_to_it(
    choice: str, data: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1024)
    away = tmp_path / "away"
    run = begin(
        data, tmp_path, "data.held_out=" + str(data / "train"), "evaluation.every_steps=3", *CHOICES[choice], f"trainer.offload_folder={away}"
    )
    wanted = {name: (plain / name).read_bytes() for name in FILES}
    assert rows(run) == rows(plain) and list(away.iterdir()) == []
    assert {name: (run / name).read_bytes() for name in FILES} == wanted
    for folder in ("model", "checkpoints/step-7"):
        shutil.rmtree(run / folder)
    resume(run)
    assert rows(run) == rows(plain) and {name: (run / name).read_bytes() for name in FILES} == wanted


def test_dry_run_counts_what_is_offloaded_and_a_machine_that_is_too_small_is_refused_with_the_keys_that_help(
    data: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    def lines(*overrides: str) -> list[str]:
        return check_data_run(load_config(plain.parent / "recipe.yaml", list(overrides)))  # type: ignore[arg-type]

    large = (
        "model.create.hidden_size=1024", "model.create.num_hidden_layers=20", "model.create.intermediate_size=2048",
        "run.directory=" + str(tmp_path)
    )
    process = TRAINING_PROCESS_BYTES >> 20
    memory, paged = (next(int(line.split()[2].replace(",", "")) for line in lines(*large, *choice) if "predicted memory" in line) for choice in ((), PAGED))
    assert paged - process < (memory - process) / 8
    away = f"trainer.offload_folder={tmp_path / 'away'}"
    # fp32 moments, a copy of a checkpoint, and the weights and gradients of layers: 2 + 3 + 2 times the weights, less the embedding.
    (told,) = [line for line in lines(*large, *PAGED, away) if line.startswith("offloaded:")]
    recipe = load_config(plain.parent / "recipe.yaml", list(large))
    assert isinstance(recipe, PretrainRecipe) and recipe.model.create is not None
    with folder_without_weights(recipe.model.create) as folder:
        weights = weight_bytes(read_shapes(folder), "float32") / 2**20
    assert 6 * weights < 1 + int(told.split()[1].replace(",", "")) < 1 + 7 * weights
    monkeypatch.setattr(check_run, "free_bytes", lambda folder: 2**20 if folder.name == "away" else 2**50)
    (tmp_path / "away").mkdir()
    with pytest.raises(RunError, match=r"make room, or name another 'trainer\.offload_folder'"):
        lines(*large, *PAGED, away)
    with pytest.raises(RunError, match=r"; set trainer\.offload and trainer\.offload_parameters to nvme, or give it more memory") as caught:
        lines(*large, "machine.memory_gib=0.7")
    assert len(str(caught.value).splitlines()) == 1
    lines(*large, "trainer.offload=nvme", "trainer.offload_parameters=nvme", "machine.memory_gib=0.7")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.offload_parameters=nvme",), "set trainer.offload to nvme too"),
        (("trainer.offload_parameters=cpu",), "must be one of none, nvme"),
        (("trainer.offload_activations=nvme", "trainer.recompute=selective"), "set trainer.recompute to none or full"),
        ((*PAGED, "trainer.optimizer=muon"), "trainer.optimizer is 'muon'"),
        (("trainer.offload_folder=/tmp",), "trainer.offload_activations"),
    ],
)
def test_offload_that_cannot_work_is_refused_in_one_line(overrides: tuple[str, ...], said: str, data: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(UserError) as caught:
        begin(data, tmp_path, *overrides)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_steps_of_a_run_with_paged_weights_are_replayed_a_kept_batch_too(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],  # noqa: F811
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    with pytest.raises(RunError):
        begin(data, tmp_path, *PAGED, "trainer.learning_rate=1e30", "trainer.max_skipped_steps=1")
    for step in (0, 1):
        capsys.readouterr()
        assert main(["replay", str(tmp_path / "run"), "--step", str(step)]) == 0
        said = capsys.readouterr()
        assert "equal bit for bit" in said.out + said.err
    assert "the largest 1e+30 in" in said.out + said.err and "  layer 0: " in said.out + said.err, "weights and gradients of layers were looked at"
