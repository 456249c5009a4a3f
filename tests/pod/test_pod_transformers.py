"""Ten steps of a pod's GRPO run, replayed from its journal in transformers and torch: weights and every row of metrics."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from grpo_replica import GrpoReplica, Settings
from pod_runs import PodRun, recipe_with
from torch import Tensor

from tandem.model.huggingface.model_folder import read_tensors
from tandem.runtime.records.journal import Journal

STEPS = 10
# The run must be well conditioned, or the distance of any fp32 run from float64 is random. With AdamW's usual epsilon a parameter whose
# gradient is only rounding error moves by the whole learning rate (gradients here are about 3e-3); with small initial embeddings
# the first norm amplifies rounding errors.
SETTINGS = Settings(learning_rate=1e-3, warmup_steps=3, weight_decay=0.1, max_grad_norm=0.5, kl_coef=0.05, epochs=2, epsilon=1e-4)
MESHES = {"one process": "", "data 2": "--parallel.data=2", "tensor 2": "--parallel.tensor=2", "2 x 2": "--parallel.data=2 --parallel.tensor=2"}
COMPARED = ("actor/pg_loss", "kl", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "actor/lr", "reward/mean")


def recorded_run(folder: Path, mesh: str) -> PodRun:
    """A run of ten steps of two updates each, in which gradients and ratios are clipped."""
    settings = asdict(SETTINGS)
    recipe = recipe_with(
        folder,
        algorithm={"group_size": 4, "kl_coef": settings["kl_coef"], "epochs": settings["epochs"]},
        trainer={name: settings[name] for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "epsilon")} | {"micro_batch_tokens": 128},
        evaluation={"every_steps": STEPS, "prompts": 1, "final_prompts": 1, "target_accuracy": 1.0},
        checkpoint={"every_steps": STEPS, "keep": 1},
        run={"max_steps": STEPS},
    )
    run = PodRun(folder, recipe)
    done = run.train("--model.create.num_key_value_heads=2", "--model.create.initializer_range=0.1", *mesh.split())
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def replayed(run: PodRun, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Returns the weights after the last step in float64, and the rows, of a replica in ``dtype``."""
    replica, rows = GrpoReplica(run.directory / "sft" / "model", dtype, SETTINGS), []
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        for step in range(STEPS):
            samples, scores = journal.samples(step), journal.scores(step)
            assert samples is not None and scores is not None
            rows.append(replica.step(step, samples, scores))
    return {name: tensor.double() for name, tensor in replica.model.state_dict().items()}, rows


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Returns the norm of the difference relative to the norm of ``wanted``."""
    squares = lambda tensors: math.fsum(tensor.square().sum().item() for tensor in tensors)
    return math.sqrt(squares(found[name].double() - wanted[name] for name in found) / squares(wanted[name] for name in found))


@pytest.mark.parametrize("mesh", [pytest.param(name, marks=() if name == "one process" else pytest.mark.full) for name in MESHES])
def test_ten_steps_are_as_near_to_a_float64_replica_in_transformers_as_one_in_fp32_is(mesh: str, tmp_path: Path) -> None:
    run = recorded_run(tmp_path, MESHES[mesh])
    start, ours = (dict(read_tensors(run.directory / folder)) for folder in ("sft/model", "model"))
    wanted, rows = replayed(run, torch.float64)
    theirs, rough_rows = replayed(run, torch.float32)
    assert distance(start, wanted) > 1e-3, "the weights moved"
    assert distance(ours, wanted) <= 4 * distance({name: theirs[name] for name in ours}, wanted)

    found = run.rows()
    assert [row["step"] for row in found] == list(range(STEPS))
    assert any(row["actor/pg_clipfrac"] > 0 for row in rows) and any(row["actor/grad_norm"] > SETTINGS.max_grad_norm for row in rows)
    for name in COMPARED:
        rough = max(abs(row[name] - exact[name]) for row, exact in zip(rough_rows, rows, strict=True))
        for row, exact in zip(found, rows, strict=True):
            assert abs(row[name] - exact[name]) <= max(1e-5 * abs(exact[name]), 4 * rough), (row["step"], name, row[name], exact[name])
