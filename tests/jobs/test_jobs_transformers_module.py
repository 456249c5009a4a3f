"""Runs with ``model.implementation: transformers``: reinforcement learning and fine-tuning of families that Tandem does not declare."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data_runs import command, refused, rows, train_until_killed, write_sections

from tandem.cli.main import main
from tandem.config.implementation import Implementation
from tandem.config.recipe import load_config
from tandem.jobs.start import dry_run, resume, train
from tandem.jobs.try_commands import data_commands, task_commands
from tandem.model.huggingface.model_folder import read_tensors
from tandem.planner.model_input import read_model
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TYPES: dict[str, dict[str, Any]] = {
    "gpt_neox": {}, "stablelm": {"qk_layernorm": True}, "starcoder2": {"sliding_window": 9}, "qwen3": {"head_dim": 16},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2}, "granite": {"logits_scaling": 3.0},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
}  # fmt: skip
STEPS, LONG = 10, 40
TRAINER: dict[str, Any] = {"learning_rate": 1e-2, "micro_batch_tokens": 64}


def early_letters(completions: list[str], **kwargs: object) -> list[float]:
    """A reward that differs between the answers of an untrained model."""
    return [sum(text.count(letter) for letter in "01234") / 8 for text in completions]


def write_model(folder: Path, model_type: str) -> Path:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    make_character_tokenizer("ascii", folder)
    vocabulary = Tokenizer.from_folder(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": vocabulary.eos_token_ids[0], "pad_token_id": vocabulary.pad_token_id}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=vocabulary.vocab_size, **SIZES, **ends, **TYPES[model_type])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def check_read_by_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]


def rl_recipe(model: Path, runs: Path, /, **changed: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "model": {"path": str(model), "implementation": "transformers"}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "rollout": {"prompts_per_step": 4, "max_tokens": 8}, "algorithm": {"name": "grpo", "group_size": 4, "kl_coef": 0.01, "kl_estimator": "k3"},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512}, "run": {"max_steps": STEPS, "directory": str(runs)},
    }  # fmt: skip
    return {**sections, **{name: {**sections.get(name, {}), **values} for name, values in changed.items()}}


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


def sft_recipe(folder: Path, model: Path, /, **changed: Any) -> Path:
    sections: dict[str, Any] = {
        "algorithm": {"name": "sft"}, "model": {"path": str(model), "implementation": "transformers"},
        "task": {"name": "sort", "min_digits": 2, "max_digits": 4},
        "data": {"sequence_length": 48, "global_batch_size": 8}, "trainer": TRAINER,
        "checkpoint": {"every_steps": 4, "keep": 2}, "run": {"max_steps": STEPS, "seed": 3, "directory": str(folder), "name": "run"},
        "machine": {"threads": 1},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    return write_sections(folder, sections, changed)


def run_sft(folder: Path, model: Path, /, **changed: Any) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    train(load_config(sft_recipe(folder, model, **changed)))
    torch.set_num_threads(threads)
    return rows(folder / "run")


@pytest.mark.full
def test_fine_tuning_of_a_declared_family_has_the_curve_of_tandems_own_network(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    ours = run_sft(tmp_path / "own", model, model={"implementation": "tandem"})
    theirs = run_sft(tmp_path / "transformers", model)
    assert ours[0]["train/loss"] - ours[-1]["train/loss"] > 0.3
    assert [row["train/loss"] for row in theirs] == pytest.approx([row["train/loss"] for row in ours], rel=1e-4)
    assert [row["actor/grad_norm"] for row in theirs] == pytest.approx([row["actor/grad_norm"] for row in ours], rel=1e-3)


LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 16.0, "target_modules": ["query_key_value", "dense_4h_to_h"]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {"gpt_neox": ("gpt_neox", {}), "dots1": ("dots1", {}), "adapter": ("gpt_neox", LORA)}
"""By name: the type of the model, and keys of the section ``trainer``."""


@pytest.fixture(scope="module", params=CASES)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the model of one of ``CASES`` and the folder of its run of 40 steps, and the case's keys."""
    model_type, trainer = CASES[request.param]
    folder = tmp_path_factory.mktemp("undisturbed")
    run_sft(folder / "whole", write_model(folder / "model", model_type), run={"max_steps": LONG}, trainer={**TRAINER, **trainer})
    return folder, trainer


def same_files(folder: Path, other: Path) -> bool:
    """Returns whether the folders of two runs have the same models and, where there is one, the same adapter."""
    files = [path.relative_to(other) for name in ("model", "adapter") for path in (other / name).glob("*.safetensors")]
    return bool(files) and all((folder / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.full
def test_a_run_that_is_killed_is_resumed_with_the_same_bits_and_transformers_reads_its_folder(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, trainer = undisturbed
    recipe = sft_recipe(tmp_path, folder / "model", run={"max_steps": LONG}, trainer={**TRAINER, **trainer})
    train_until_killed(recipe, tmp_path / "run", 5, limit_s=240)
    assert len(rows(tmp_path / "run")) < LONG
    threads = torch.get_num_threads()
    resume(tmp_path / "run")
    torch.set_num_threads(threads)
    whole = folder / "whole" / "run"
    assert rows(tmp_path / "run") == rows(whole) and rows(whole)[0]["train/loss"] > rows(whole)[-1]["train/loss"]
    assert same_files(tmp_path / "run", whole) and (whole / "adapter").exists() == bool(trainer)
    check_read_by_transformers(whole / "model")


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_ranks_with_and_without_shards_have_the_curve_of_one(zero: int, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, trainer = undisturbed
    command("train", str(sft_recipe(tmp_path, folder / "model", parallel={"data": 2, "zero": zero}, trainer={**TRAINER, **trainer})))
    expected = [row["train/loss"] for row in rows(folder / "whole" / "run")[:STEPS]]
    assert [row["train/loss"] for row in rows(tmp_path / "run")] == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module", params=["dots1", "adapter"])
def undisturbed_grpo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the model of one of ``CASES`` and the folder of its run of ten steps of GRPO, and the sections of the recipe beside those of every one."""
    model_type, trainer = CASES[request.param]
    folder = tmp_path_factory.mktemp("grpo")
    changed = {
        "trainer": {**trainer, "learning_rate": 1e-2}, "rewards": {"functions": [{"function": f"{__file__}:early_letters"}]},
        "checkpoint": {"every_steps": 3, "keep": 2}, "machine": {"threads": 1},
    }  # fmt: skip
    write_model(folder / "model", model_type)
    grpo(folder, folder / "model", changed)
    return folder, changed


def grpo(folder: Path, model: Path, changed: dict[str, Any], parallel: dict[str, Any] | None = None) -> None:
    """Writes the recipe of a run of GRPO named ``run`` in ``folder`` and trains it."""
    folder.mkdir(exist_ok=True)
    recipe = write_sections(folder, rl_recipe(model, folder, **changed), {"run": {"name": "run"}, "parallel": parallel or {}})
    command("train", str(recipe))


@pytest.mark.full
def test_grpo_that_is_killed_is_resumed_with_the_same_bits(undisturbed_grpo: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, changed = undisturbed_grpo
    recipe = write_sections(tmp_path, rl_recipe(folder / "model", tmp_path, **changed), {"run": {"name": "run"}})
    train_until_killed(recipe, tmp_path / "run", 4, limit_s=240)
    assert len(rows(tmp_path / "run")) < STEPS
    command("resume", str(tmp_path / "run"))
    whole = folder / "run"
    assert rows(tmp_path / "run") == rows(whole) and [row["mismatch_max_abs"] for row in rows(whole)] == [0.0] * STEPS
    assert any(row["actor/grad_norm"] > 0 for row in rows(whole)) and same_files(tmp_path / "run", whole)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 2])
def test_grpo_on_two_ranks_draws_with_the_bits_of_the_trainer_and_begins_with_the_curve_of_one(
    zero: int, undisturbed_grpo: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, changed = undisturbed_grpo
    grpo(tmp_path, folder / "model", changed, {"data": 2, "zero": zero})
    ours, one = rows(tmp_path / "run"), rows(folder / "run")
    assert [row["mismatch_max_abs"] for row in ours] == [0.0] * STEPS
    # Later samples are drawn with weights whose last bits differ, and another token is drawn somewhere.
    for key in ("reward/mean", "actor/grad_norm"):
        assert [row[key] for row in ours[:2]] == pytest.approx([row[key] for row in one[:2]], rel=1e-3)


CANNOT = {
    "parallel.tensor=2": "'parallel.tensor' is 2 and model.implementation 'transformers', which computes whole models; set it to 1",
    "parallel.pipeline=2": "'parallel.pipeline' is 2 and model.implementation", "parallel.context=2": "'parallel.context' is 2 and model.implementation",
    "trainer.lora.quantization=nf4": "'trainer.lora.quantization' is 'nf4' and model.implementation",
    "trainer.router_balance_loss=0.1": "'trainer.router_balance_loss' is 0.1 and model.implementation",
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
