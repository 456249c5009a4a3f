"""Runs with ``model.implementation: transformers``: reinforcement learning and fine-tuning of families that Tandem does not declare."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_runs import refused
from dequantized import dequantized
from module_runs import STEPS, check_read_by_transformers, early_letters, rl_recipe, run_sft, sft_recipe, write_model

from tandem.cli.main import main
from tandem.config.implementation import Implementation
from tandem.config.recipe import load_config
from tandem.jobs.start import dry_run, train
from tandem.jobs.try_commands import data_commands, task_commands
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.peft_folder import read_adapter
from tandem.planner.model_input import read_model
from tandem.types import UserError


def test_the_commands_at_the_end_of_a_run_name_what_computes_the_model() -> None:
    theirs = Implementation("transformers")
    flags_of = {theirs: " --model-impl transformers", theirs._replace(trust_remote_code=True): " --model-impl transformers --trust-remote-code"}
    for implemented_by, flags in flags_of.items():
        for commands in (data_commands(Path("run/model"), None, implemented_by, 40), task_commands(Path("run/model"), "12", implemented_by, 40)):
            assert f" generate run/model{flags} --prompt " in commands[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "trainer"),
    [
        ("gpt_neox", {}), ("stablelm", {"precision": "bf16", "recompute": "full"}), ("starcoder2", {"recompute": "selective"}), ("granite", {}),
        ("olmoe", {"recompute": "full"}), ("qwen3_moe", {"precision": "bf16"}),
        ("dots1", {"optimizer": "muon", "weight_decay": 0.1}),
    ],
    ids=lambda value: str(value),
)
def test_grpo_trains_for_ten_steps_with_the_bits_of_the_rollout_and_transformers_reads_the_result(
    model_type: str, trainer: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model", model_type)
    result = train(rl_recipe(folder, tmp_path / "runs", trainer=trainer), rewards=[early_letters])
    assert result.steps == STEPS
    trained = Path(result.model)
    written = [json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch_max_abs"] for row in written] == [0.0] * STEPS and written[0]["kl"] == 0.0
    assert any(row["actor/grad_norm"] > 0 for row in written)
    before, after = dict(read_tensors(folder)), dict(read_tensors(trained))
    assert before.keys() == after.keys() and any(not before[name].equal(tensor) for name, tensor in after.items())
    check_read_by_transformers(trained)
    capsys.readouterr()
    assert main(["generate", str(trained), "--model-impl", "transformers", "--prompt", "12", "--max-tokens", "4", "--temperature", "0"]) in (0, None)
    assert capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "target_modules"), [("gpt_neox", ["query_key_value", "dense_h_to_4h"]), ("qwen3_moe", ["q_proj", "o_proj"])])
def test_grpo_trains_an_adapter_that_peft_reads_and_the_model_with_it_merged(model_type: str, target_modules: list[str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "model", model_type)
    lora = {"rank": 4, "alpha": 16.0, "target_modules": target_modules}
    result = train(rl_recipe(folder, tmp_path / "runs", trainer={"lora": lora, "learning_rate": 1e-2}), rewards=[early_letters])
    trained = Path(result.model)
    written = [json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch_max_abs"] for row in written] == [0.0] * STEPS and written[0]["kl"] == 0.0 < written[-1]["kl"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), trained.parent / "adapter")
    merged, start = AutoModelForCausalLM.from_pretrained(trained), AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=0, atol=1e-4)
        assert not torch.allclose(start(tokens).logits, merged(tokens).logits, atol=1e-3)
    before, after = dict(read_tensors(folder, stacked=False)), dict(read_tensors(trained, stacked=False))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed and all(name.removesuffix(".weight").rpartition(".")[2] in target_modules for name in changed)


@pytest.mark.full
def test_grpo_trains_an_adapter_beside_4_bits_with_the_bits_of_the_rollout_and_merges_it_into_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gpt_neox")
    lora = {"rank": 4, "alpha": 16.0, "target_modules": ["query_key_value", "dense_h_to_4h"], "quantization": "nf4"}
    result = train(rl_recipe(folder, tmp_path / "runs", trainer={"lora": lora, "learning_rate": 1e-2}), rewards=[early_letters])
    trained = Path(result.model)
    written = [json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch_max_abs"] for row in written] == [0.0] * STEPS and written[0]["kl"] == 0.0 < written[-1]["kl"]
    before, after = dict(read_tensors(folder, stacked=False)), dict(read_tensors(trained, stacked=False))
    adapter = dict(read_adapter(trained.parent / "adapter"))
    changed = {name for name in before if not before[name].equal(after[name])}
    module = read_shapes(folder, implemented_by=Implementation("transformers")).transformers
    assert module is not None and changed == {f"{name}.weight" for name in module.linears}
    for name in changed:
        expected, low = dequantized(before[name], "nf4"), f"{name.removesuffix('.weight')}.lora_A.weight"
        if low in adapter:
            expected = expected + 4.0 * adapter[low.replace("lora_A", "lora_B")].double() @ adapter[low].double()
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)
    check_read_by_transformers(trained)


@pytest.mark.full
def test_fine_tuning_of_a_declared_family_has_the_curve_of_tandems_own_network(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    ours = run_sft(tmp_path / "own", model, model={"implementation": "tandem"})
    theirs = run_sft(tmp_path / "transformers", model)
    assert ours[0]["train/loss"] - ours[-1]["train/loss"] > 0.3
    assert [row["train/loss"] for row in theirs] == pytest.approx([row["train/loss"] for row in ours], rel=1e-4)
    assert [row["actor/grad_norm"] for row in theirs] == pytest.approx([row["actor/grad_norm"] for row in ours], rel=1e-3)


CANNOT = {
    "parallel.tensor=2": "'parallel.tensor' is 2 and model.implementation 'transformers', which computes whole models; set it to 1",
    "parallel.pipeline=2": "'parallel.pipeline' is 2 and model.implementation", "parallel.context=2": "'parallel.context' is 2 and model.implementation",
    "parallel.expert=2 parallel.data=2": "'parallel.expert' is 2 and model.implementation",
    "trainer.router_bias_rate=0.1": "'trainer.router_bias_rate' is 0.1 and model.implementation",
    "trainer.lora.target_modules=[dense] model.implementation=tandem": "'trainer.lora.target_modules' has 'dense'; supported are",
    "parallel.zero=3 parallel.data=2": "set it to 0 or 1 or 2",
    "trainer.offload_activations=nvme": "'trainer.offload_activations' is 'nvme' and model.implementation",
    "trainer.offload_parameters=nvme trainer.offload=nvme": "'trainer.offload_parameters' is 'nvme' and model.implementation",
    "model.trust_remote_code=true model.implementation=tandem": "'model.trust_remote_code' is true, which is not read: model.implementation is 'tandem'",
}  # fmt: skip
CANNOT_IN_RL: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rollout": {"engine": {"model_impl": "transformers"}}}, "trainer and rollout both use model.implementation"),
    ({"rollout": {"engine": {"tensor_parallel_size": 2}}}, "'rollout.engine.tensor_parallel_size' is 2 and model.implementation"),
    ({"rollout": {"backend": "vllm"}}, "'rollout.backend' is 'vllm' and model.implementation"),
    ({"algorithm": {"name": "ppo"}}, "not models with value heads"),
)


def test_what_a_module_of_transformers_cannot_have_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe = sft_recipe(tmp_path / "run", tmp_path / "model")
    for options, says in CANNOT.items():
        with pytest.raises(UserError) as caught:
            load_config(recipe, [f"--{each}" for each in options.split()])
        assert says in str(caught.value) and "\n" not in str(caught.value)
    for changed, says in CANNOT_IN_RL:
        (tmp_path / "rl.yaml").write_text(yaml.safe_dump(rl_recipe(tmp_path / "model", tmp_path / "runs", **changed)))
        with pytest.raises(UserError) as caught:
            load_config(tmp_path / "rl.yaml")
        assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.full
def test_the_command_refuses_before_any_work_what_only_the_folder_shows(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gpt_neox")
    recipe = sft_recipe(tmp_path / "run", model)
    assert "has model_type 'gpt_neox'; supported are" in refused("train", str(recipe), "--dry-run", "--model.implementation=auto")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}))
    assert "depends on the longest sequence of a batch" in refused("train", str(recipe))
    assert not (tmp_path / "run" / "run").exists()


@pytest.mark.full
def test_a_dry_run_and_the_planner_read_the_module(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gpt_neox")
    recipe = sft_recipe(tmp_path / "run", model)
    assert "predicted memory: " in dry_run(load_config(recipe), recipe)
    shapes, _ = read_model(str(recipe))
    assert shapes.transformers is not None and shapes.transformers.class_name == "GPTNeoXForCausalLM"
