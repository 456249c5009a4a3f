"""Weights, gradients and activations in files, from a recipe: the bits of a run in memory, in its rows, its checkpoints and its model, and
after a resume; and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from test_jobs_numerics import begin, data, rows  # noqa: F401 - a fixture too

from tandem.jobs.start import resume

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
def test_offloaded_run_has_every_bit_of_one_in_memory_and_resumes_to_it(choice: str, data: Path, plain: Path, tmp_path: Path) -> None:  # noqa: F811
    torch.set_num_threads(1)
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
