"""DeepSpeed's real engines against Tandem's own trainer: losses, weights, what engines receive, checkpoints, and steps that are left out."""

import json
import os
import subprocess
import sys
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_ranks import Job
from safetensors.torch import load_file

from tandem.backends.environment import python_of, tandem_path
from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model
from tandem.types import UserError

HERE = Path(__file__).parent
EXPERTS = {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of DeepSpeed's environment."""
    try:
        return python_of("deepspeed")
    except UserError as error:
        pytest.skip(str(error))


def new_model(folder: Path, **settings: Any) -> Path:
    """A folder with random weights, large enough that mistakes show."""
    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
        "max_position_embeddings": 48, "initializer_range": 0.2,
    }  # fmt: skip
    create_model(NewModelConfig(**small | settings), 0, folder)  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_model(tmp_path_factory.mktemp("model") / "model")


def train(job: Job, python: Path | str) -> dict[str, Any]:
    """Runs every rank of ``job``; returns what rank 0 wrote."""
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": tandem_path(folder), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    job = replace(job, store=str(folder / uuid.uuid4().hex))
    logs = [(folder / f"rank-{rank}.log").open("w+b") for rank in range(job.world)]
    ranks = [
        subprocess.Popen(
            [str(python), str(HERE / "deepspeed_ranks.py"), json.dumps(asdict(replace(job, rank=rank)))], env=environment, stdout=log, stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * job.world, "\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in range(job.world))
    result: dict[str, Any] = torch.load(folder / "result.pt")
    return result


def largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def assert_equal_within(bound: float, found: dict[str, Any], native: dict[str, Any]) -> None:
    """Compares every metric of every step and every weight."""
    assert len(found["rows"]) == len(native["rows"])
    for ours, theirs in zip(found["rows"], native["rows"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert abs(ours[name] - value) <= bound * max(1.0, abs(value)), (name, ours[name], value)
    assert largest(found["parameters"], native["parameters"]) <= bound and largest(found["weights"], native["weights"]) <= bound


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tandem's own trainer, 20 steps in one process."""
    return train(Job(str(model), str(tmp_path_factory.mktemp("native")), "tandem"), sys.executable)


@pytest.mark.full
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_have_the_losses_and_weights_of_the_native_trainer(
    ranks: int, stage: int, offload: str, python: Path, model: Path, native: dict[str, Any], tmp_path: Path
) -> None:
    found = train(Job(str(model), str(tmp_path), world=ranks, stage=stage, offload=offload), python)
    assert_equal_within(1e-5, found, native)
    assert found["updates"] == 20
    # What engines receive are the very weights, under Hugging Face's names: before the first step those of the folder.
    folder = load_file(model / "model.safetensors")
    assert found["start"].keys() == folder.keys() and all(torch.equal(found["start"][name], folder[name]) for name in folder)
    weights, parameters = found["weights"], found["parameters"]
    assert torch.equal(weights["model.embed_tokens.weight"], parameters["embed_tokens"])
    stacked = torch.cat([weights[f"model.layers.1.self_attn.{matrix}_proj.weight"] for matrix in "qkv"])
    assert torch.equal(stacked, parameters["layers.1.qkv_proj.weight"])
    assert not torch.equal(weights["model.norm.weight"], folder["model.norm.weight"])


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resume_has_the_same_curve_bit_for_bit_and_another_layout_reads_the_same_checkpoint(
    stage: int, python: Path, model: Path, native: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(str(model), str(tmp_path / "run"), world=2, stage=stage, offload="cpu" if stage == 2 else "none")
    # DeepSpeed's own AdamW has another bit in its third power of beta 2 if it computes it at once.
    whole = train(replace(job, save_after=2), python)
    resumed = train(replace(job, first=2), python)
    assert resumed["rows"] == whole["rows"][2:], "the curve differs after a resume"
    assert all(torch.equal(resumed["weights"][name], value) for name, value in whole["weights"].items())
    # Without its moments it would be another run: the same weights, trained on from fresh moments, end elsewhere.
    assert largest(resumed["parameters"], native["parameters"]) < 1e-5
    for other in (replace(job, world=1, stage=4 - stage, offload="none", first=2), replace(job, world=1, backend="tandem", offload="none", first=2)):
        found = train(other, python if other.backend == "deepspeed" else sys.executable)
        assert found["start"].keys() == resumed["start"].keys() and all(torch.equal(found["start"][name], resumed["start"][name]) for name in found["start"])
        assert largest(found["parameters"], native["parameters"]) < 1e-5 and found["updates"] == 20


@pytest.mark.full
@pytest.mark.parametrize(("stage", "offload"), [(1, "none"), (2, "cpu"), (3, "none"), (3, "cpu")])
def test_a_gradient_that_is_not_finite_is_left_out_as_the_native_trainer_does(stage: int, offload: str, python: Path, model: Path, tmp_path: Path) -> None:
    native = train(Job(str(model), str(tmp_path / "native"), "tandem", last=8, poisoned=4), sys.executable)
    found = train(Job(str(model), str(tmp_path / "found"), world=2, stage=stage, offload=offload, last=8, poisoned=4), python)
    assert [row["updated"] for row in found["rows"]] == [1, 1, 1, 1, 0, 1, 1, 1] == [row["updated"] for row in native["rows"]]
    assert found["updates"] == 7 and largest(found["parameters"], native["parameters"]) < 1e-5
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr"):
        for step in (5, 6, 7):
            assert abs(found["rows"][step][name] - native["rows"][step][name]) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "job", "stages"),
    [
        pytest.param({}, {"epochs": 2}, (1, 3), id="two minibatches, two epochs"),
        pytest.param({}, {"share_prompts": True}, (3,), id="shared prompts"),
        pytest.param({}, {"precision": "bf16"}, (1, 3), id="products in bf16"),
        pytest.param({}, {"recompute": "full"}, (2,), id="recomputed layers"),
        pytest.param({}, {"recompute": "selective"}, (1,), id="recomputed norms"),
        pytest.param({"tie_word_embeddings": False}, {}, (3,), id="a head of its own"),
        pytest.param(EXPERTS, {}, (1, 2, 3), id="mixture of experts"),
    ],
)
def test_other_models_and_settings_have_the_weights_of_the_native_trainer(
    settings: dict[str, Any], job: dict[str, Any], stages: tuple[int, ...], python: Path, tmp_path: Path
) -> None:
    model = str(new_model(tmp_path / "model", **settings))
    native = train(Job(model, str(tmp_path / "native"), "tandem", last=6, **job), sys.executable)
    for stage in stages:
        assert_equal_within(1e-5, train(Job(model, str(tmp_path / f"{stage}"), world=2, stage=stage, last=6, **job), python), native)
