"""A pod whose trainer multiplies in 16 bits: its rollout uses the same arithmetic, so their bits agree; other pairs are corrected."""

from pathlib import Path

import pytest
import torch
from pod_runs import PodRun

from tandem.kernels import select
from tandem.kernels.mixed import dot_products
from tandem.model.huggingface.model_folder import read_tensors
from tandem.pod.states import TrainerState

FEW_STEPS = ("--run.max_steps=3", "--sft.steps=6")


def train(run: PodRun, *settings: str) -> str:
    done = run.train(*FEW_STEPS, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rollout_and_trainer_of_16_bits_agree_bit_for_bit(precision: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    said = train(run, f"--trainer.precision={precision}")
    assert (f"trainer.precision {precision} is emulated in trainer and rollout" in said) == (precision == "fp16" or not dot_products(select()))
    rows = run.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 3
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert ("train/loss_scale" in rows[0]) == (precision == "fp16")
    # Samples and gradients differ from those in fp32.
    assert rows[0]["actor/grad_norm"] != undisturbed.rows()[0]["actor/grad_norm"]


@pytest.mark.full
def test_rollout_and_trainer_of_16_bit_weights_agree_bit_for_bit_and_half_the_bytes_travel(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, "--trainer.dtype=bfloat16", "--run.max_steps=2", "--sft.steps=4")
    rows = run.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 2
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert {tensor.dtype for _, tensor in read_tensors(run.directory / "model")} == {torch.bfloat16}
    registered = [next(t.detail["bytes"] for t in of.transitions() if t.state == TrainerState.REGISTER) for of in (run, undisturbed)]
    assert 2 * registered[0] == registered[1]


@pytest.mark.full
@pytest.mark.parametrize("settings", [
    "--parallel.data=2 --parallel.tensor=2 --model.create.num_key_value_heads=2",
    "--parallel.data=2 --parallel.zero=3 --trainer.optimizer=muon",
    "--rollout.engine.tensor_parallel_size=2 --model.create.num_key_value_heads=2",
    "--rollout.engine.kv_cache_dtype=int8 --rollout.temperature=0.7",
    "--model.create.architecture=qwen3_moe --model.create.num_experts=4 --residents.plan=offload",
])  # fmt: skip
def test_16_bit_weights_agree_on_meshes_caches_experts_and_temperatures(settings: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, "--trainer.dtype=bfloat16", *settings.split())
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in run.rows()] == [(0.0, 0.0)] * 3


@pytest.mark.full
def test_a_pod_in_float64_is_corrected_and_hardly_needs_it(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, "--trainer.dtype=float64", "--algorithm.tis_cap=2.0", "--algorithm.old_logprobs=recompute")
    assert all(row["mismatch_max_abs"] < 1e-10 for row in run.rows())


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("settings", [
    "--parallel.data=2 --parallel.tensor=2 --model.create.num_key_value_heads=2",
    "--rollout.engine.tensor_parallel_size=2 --model.create.num_key_value_heads=2",
    "--rollout.engine.kv_cache_dtype=bfloat16",
    "--model.create.architecture=qwen3_moe --model.create.num_experts=4",
    "--machine.kernels=reference --rollout.temperature=0.7",
])  # fmt: skip
def test_16_bits_agree_on_meshes_caches_experts_and_temperatures(precision: str, settings: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(run, f"--trainer.precision={precision}", *settings.split())
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in run.rows()] == [(0.0, 0.0)] * 3


@pytest.mark.full
def test_quantised_rollout_of_a_trainer_of_16_bits_is_corrected(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train(
        run, "--trainer.precision=bf16", "--rollout.engine.quantization=int8", "--algorithm.tis_cap=2.0", "--algorithm.old_logprobs=recompute",
    )  # fmt: skip
    assert all(row["mismatch_kl"] > 0 for row in run.rows())
