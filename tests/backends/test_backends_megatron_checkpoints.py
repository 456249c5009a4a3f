"""Runs on Megatron-Core that go on from a checkpoint, and a machine that it does not run on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from meshes_of_steps import assert_close, make_folder, train
from real_megatron import needs_megatron

from tandem.layout.mesh import MeshShape


@needs_megatron
@pytest.mark.full
@pytest.mark.parametrize(
    "name, shape, zero, precision",
    [
        ("qwen3", MeshShape(data=2), 1, "fp32"), ("qwen3", MeshShape(tensor=2), 0, "fp32"), ("qwen3_moe", MeshShape(data=2, expert=2), 1, "fp32"),
        ("qwen3", MeshShape(data=2), 1, "bf16"), ("qwen3", MeshShape(pipeline=2), 0, "bf16"), ("deepseek_v3", MeshShape(data=2, expert=2), 1, "fp32"),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_bits_and_either_trainer_reads_it(
    name: str, shape: MeshShape, zero: int, precision: str, sidecar: Path, tmp_path: Path
) -> None:
    settings = {"precision": precision}
    model = make_folder(tmp_path / "model", name)
    whole = train(model, tmp_path / "whole", "megatron", shape, zero, steps=6, sidecar=sidecar, trainer=settings)
    train(model, tmp_path / "megatron", "megatron", shape, zero, steps=3, save_at=(3,), sidecar=sidecar, trainer=settings)
    shutil.copytree(tmp_path / "megatron" / "checkpoints", tmp_path / "tandem" / "checkpoints")
    for trainer in ("megatron", "tandem"):
        run = tmp_path / trainer
        rest = train(model, run, trainer, shape, zero, steps=6, sidecar=sidecar if trainer == "megatron" else None, trainer=settings)
        assert len(rest.metrics) == 3
        if trainer == "megatron":
            assert rest.metrics == whole.metrics[3:] and all(torch.equal(rest.after[each], whole.after[each]) for each in whole.after)
        else:
            assert_close(rest, whole._replace(metrics=whole.metrics[3:]), *((1e-5,) if precision == "fp32" else (0.05, 0.1)))


@needs_megatron
@pytest.mark.full
def test_a_machine_without_cuda_and_without_the_shim_is_refused_in_one_line_before_any_work(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    for more in ("--dry-run",), ():
        command = [sys.executable, "-m", "tandem.cli.main", "train", "sort", "--trainer", "megatron", f"--run.directory={tmp_path / 'runs'}", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "Megatron-Core needs a CUDA device" in done.stderr and "trainer.backend to tandem" in done.stderr
    assert not (tmp_path / "runs").exists()
