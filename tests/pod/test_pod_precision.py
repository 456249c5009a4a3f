"""A pod whose trainer multiplies in 16 bits: its rollout uses the same arithmetic, so their bits agree; other pairs are corrected."""

from pathlib import Path

import pytest
from pod_runs import PodRun

FEW_STEPS = ("--run.max_steps=3", "--sft.steps=6")


def train(run: PodRun, *settings: str) -> str:
    done = run.train(*FEW_STEPS, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rollout_and_trainer_of_16_bits_agree_bit_for_bit(precision: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    said = train(run, f"--trainer.precision={precision}")
    assert f"trainer.precision {precision} is emulated in trainer and rollout" in said
    rows = run.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 3
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert ("train/loss_scale" in rows[0]) == (precision == "fp16")
    # Samples and gradients differ from those in fp32.
    assert rows[0]["actor/grad_norm"] != undisturbed.rows()[0]["actor/grad_norm"]


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
