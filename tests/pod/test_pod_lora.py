"""LoRA in a pod: only the adapter is trained, sent to the engine and saved; the reference is the model without it; and the curve survives kills and is the
same on every plan of residents."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pod_runs import RECIPE, PodRun, difference, finish
from safetensors.torch import load_file

from tandem.config.lora import LoraConfig
from tandem.config.recipe import load_config
from tandem.jobs.start import train
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.types import UserError

LORA = "--trainer.lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj, down_proj]}"
# The tiny model: two layers, hidden 32, 2 query heads and 1 key head of 16, intermediate 64.
ADAPTER_NUMBERS = 2 * 4 * ((32 + 32) + (32 + 16) + (64 + 32))


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_pod_trains_sends_and_saves_the_adapter_alone(tmp_path: Path) -> None:
    rewards = f"--rewards.functions=[{{function: '{Path(__file__).parent}/rewards.py:digits'}}]"
    given = [f"--run.directory={tmp_path}", "--run.name=run", "--run.max_steps=2", LORA, rewards]
    train(load_config(RECIPE, given), inline=True, progress=False)
    run = PodRun(tmp_path)
    rows = rows_of(run.directory)
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 2
    # The reference is the actor without its adapter, which is 0 at the start.
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"] and rows[0]["actor/grad_norm"] > 0
    details = {name: [t.detail for t in run.transitions() if t.state == name and t.detail] for name in ("register", "start_engine")}
    assert [detail["bytes"] for detail in details["register"]] == [4 * ADAPTER_NUMBERS] * 3, "steps 0, 1 and 2"
    start = run.directory / "sft" / "model"
    base = sum(parameter.numel for parameter in parameters(read_shapes(start)))
    assert [detail["base_bytes"] for detail in details["start_engine"]] == [4 * base], "read once, at the engine's start"
    saved = load_file(run.directory / "checkpoints" / "step-2" / "rank-00000.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == 3 * ADAPTER_NUMBERS, "the adapter and its two moments"
    adapter, merged = load_file(run.directory / "adapter" / "adapter_model.safetensors"), load_file(run.directory / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in adapter.values()) == ADAPTER_NUMBERS
    for name, weight in load_file(start / "model.safetensors").items():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB")
        change = torch.zeros(()) if a is None or b is None else 8 / 4 * b.double() @ a.double()
        assert torch.allclose(merged[name].double(), weight.double() + change, atol=1e-6), name
        assert a is None or change.any()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--trainer.lora={rank: 0}"], "trainer.lora.rank"),
        (["--trainer.lora={alpha: 0}"], "trainer.lora.alpha"),
        (["--trainer.lora={target_modules: []}"], "trainer.lora.target_modules"),
        (["--trainer.lora={target_modules: [q_proj, lm_head]}"], "'lm_head'"),
        (["--trainer.lora={target_modules: [q_proj, q_proj]}"], "'q_proj' twice"),
        (["--trainer.lora={dropout: 0.1}"], "dropout"),
        ([LORA, "--trainer.optimizer=muon"], "trainer.optimizer"),
        ([LORA, "--trainer.offload=nvme"], "trainer.offload"),
        ([LORA, "--parallel.data=2", "--parallel.zero=3"], "parallel.zero"),
        ([LORA, "--algorithm.name=ppo", "--critic.shared=true"], "critic.shared"),
        ([LORA, "--reference.update=ema"], "reference.update"),
        (["--trainer.lora={quantization: nf3}"], "quantization"),
        (["--trainer.lora={quantization: nf4}", "--trainer.precision=bf16"], "trainer.precision"),
        (["--trainer.lora={quantization: nf4}", "--rollout.engine.quantization=int8"], "rollout.engine.quantization"),
        (["--trainer.lora={quantization: nf4}", "--parallel.tensor=2", "--parallel.deterministic=false"], "parallel.deterministic"),
        (
            ["--trainer.lora={quantization: nf4}", "--rollout.engine={deterministic: false, tensor_parallel_size: 2}", "--algorithm.tis_cap=2.0",
             "--algorithm.old_logprobs=recompute"], "rollout.engine.deterministic",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_lora_does_not_support_are_refused_in_one_line(given: list[str], named: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(RECIPE, given)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_mixture_of_experts_has_an_adapter_of_its_attention_only() -> None:
    shapes = ModelShapes("qwen3_moe", 64, 32, 2, 4, 2, 8, 48, 64, True, experts=ExpertShapes(4, 2, 16))
    attention = replace(shapes, lora=LoraConfig(target_modules=("q_proj", "o_proj")))
    assert sum(".lora_" in parameter.name for parameter in parameters(attention)) == 2 * 2 * shapes.num_hidden_layers
    with pytest.raises(ValueError, match="'up_proj' can have no adapter"):
        replace(shapes, lora=LoraConfig(target_modules=("q_proj", "up_proj")))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("lora"))
    done = run.train(LORA)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.full
@pytest.mark.parametrize("fault", ["trainer_worker:after:train:3", "rollout_worker:after:update_weight:1", "trainer_worker:before:save:4"])
def test_kill_of_a_part_changes_no_bit_of_the_adapter(fault: str, lora_run: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--fault", fault, LORA)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, lora_run) == [] and run.left_behind() == []


@pytest.mark.full
def test_run_that_was_killed_whole_resumes_bit_for_bit_and_is_verified_and_replayed(lora_run: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    assert run.train("--fault", "pod:after:commit_scores:5", LORA).returncode == -9
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, lora_run) == []
    assert (run.directory / "adapter" / "adapter_model.safetensors").read_bytes() == (
        lora_run.directory / "adapter" / "adapter_model.safetensors"
    ).read_bytes()
    replayed = finish(run.begin("replay", str(run.directory), "--step", "3"))
    assert replayed.returncode == 0 and "train: 18 of 18 equal bit for bit" in replayed.stdout, replayed.stdout
    assert finish(run.begin("verify", str(run.directory))).returncode == 0
    weights = run.directory / "sft" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    damaged = finish(run.begin("verify", str(run.directory)))
    assert damaged.returncode != 0 and "an adapter" in damaged.stdout + damaged.stderr


@pytest.mark.full
def test_quantized_weights_beside_the_adapter_have_the_same_bits_in_trainer_and_engine_and_after_a_kill(tmp_path: Path) -> None:
    lora = "--trainer.lora={rank: 4, quantization: nf4}"
    run, killed = PodRun(tmp_path / "whole"), PodRun(tmp_path / "killed")
    done = run.train(lora, "--residents.plan=sleep")
    assert done.returncode == 0, done.stderr
    rows = rows_of(run.directory)
    assert {(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows} == {(0.0, 0.0)}
    # The reference is the quantized model without its adapter, which is 0 at the start.
    assert rows[0]["kl"] == 0.0 < rows[1]["kl"]
    assert killed.train(lora, "--residents.plan=sleep", "--fault", "pod:after:commit_scores:5").returncode == -9
    done = killed.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(killed, run) == []
    replayed = finish(run.begin("replay", str(run.directory), "--step", "3"))
    assert replayed.returncode == 0 and "equal bit for bit" in replayed.stdout, replayed.stdout


@pytest.mark.full
def test_an_engine_of_two_ranks_has_the_bits_of_the_quantized_weights_beside_the_adapter(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--trainer.lora={rank: 4, quantization: nf4}", "--rollout.engine={tensor_parallel_size: 2}", HEADS, "--run.max_steps=2")
    assert done.returncode == 0, done.stderr
    rows = rows_of(run.directory)
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 2 and rows[1]["kl"] > 0


@pytest.mark.full
@pytest.mark.parametrize("plan", ["sleep", "offload", "figure", "terminate"])
def test_plans_of_residents_change_no_bit(plan: str, lora_run: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(LORA, f"--residents.plan={plan}")
    assert done.returncode == 0, done.stderr
    for row, expected in zip(run.rows(), lora_run.rows(), strict=True):
        assert {name: value for name, value in row.items() if not name.startswith("memory/")} == {
            name: value for name, value in expected.items() if not name.startswith("memory/")
        }


HEADS = "--model.create.num_key_value_heads=2"  # of which each tensor-parallel rank has one


@pytest.fixture(scope="module")
def run_of_two_heads(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("heads"))
    done = run.train(LORA, HEADS)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [
        ["--parallel.data=2"],
        ["--parallel.data=2", "--parallel.zero=2"],
        ["--parallel.tensor=2", "--rollout.engine.tensor_parallel_size=2"],
        ["--parallel.pipeline=2"],
        ["--parallel.context=2", "--rollout.workers=2"],
    ],
    ids=lambda mesh: "_".join(mesh).replace("--", ""),
)
def test_ranks_of_every_mesh_give_the_curve_of_one(mesh: list[str], run_of_two_heads: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(LORA, HEADS, *mesh)
    assert done.returncode == 0, done.stderr
    for row, expected in zip(run.rows(), run_of_two_heads.rows(), strict=True):
        assert row["mismatch_kl"] == 0.0
        for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "kl"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
