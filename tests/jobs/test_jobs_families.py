"""A folder of every model family is trained by reinforcement learning, and the command generates with the result."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from listed_families import TINY, random_peer

from tandem.cli.main import main
from tandem.config.model import NewModelConfig
from tandem.jobs.start import train
from tandem.layout.expert_shapes import CHOICE_BIAS
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_folder import read_shapes, read_tensors
from tandem.runtime.records.metrics import read_rows
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import Tokenizer

STEPS = 10


def early_letters(completions: list[str], **kwargs: object) -> list[float]:
    """A reward that differs between the answers of an untrained model."""
    return [sum(text.count(letter) for letter in "01234") / 8 for text in completions]


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(TINY))
def test_grpo_trains_a_folder_of_the_family_for_ten_steps_and_generate_draws_what_transformers_draws_from_the_result(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is transformers' and turns on all terms of the family; sequences are longer than its windows."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    make_character_tokenizer(NewModelConfig(family).characters, folder)
    random_peer(family, **{**TINY[family], "vocab_size": Tokenizer.from_folder(folder).vocab_size}).save_pretrained(folder)
    recipe = {
        "model": {"path": str(folder)}, "task": {"name": "sort", "min_digits": 4, "max_digits": 6},
        "rollout": {"prompts_per_step": 4, "max_tokens": 8}, "algorithm": {"name": "grpo", "group_size": 4, "kl_coef": 0.01, "kl_estimator": "k3"},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512}, "run": {"max_steps": STEPS, "directory": str(tmp_path / "runs")},
    }  # fmt: skip
    result = train(recipe, rewards=[early_letters])
    rows = read_rows(result.directory / "metrics.jsonl")
    assert result.steps == len(rows) == STEPS
    assert all(row["mismatch_kl"] == 0.0 and row["mismatch_max_abs"] == 0.0 and row["actor/grad_norm"] > 0 for row in rows)
    trained = Path(result.model)
    assert read_shapes(trained) == read_shapes(folder)
    before, after = dict(read_tensors(folder)), dict(read_tensors(trained))
    assert before.keys() == after.keys()
    assert any(not before[name].equal(tensor) for name, tensor in after.items())
    assert all(before[name].equal(tensor) for name, tensor in after.items() if name.endswith(CHOICE_BIAS))
    capsys.readouterr()
    assert main(["generate", str(trained), "--prompt", "86433=", "--max-tokens", "12", "--temperature", "0", "--json"]) in (0, None)
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prompt, tokens = Tokenizer.from_folder(trained).encode("86433="), row["token_ids"]
    with torch.no_grad():
        likeliest = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
    assert tokens and tokens == likeliest[len(prompt) - 1 : -1].tolist()


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"tensor": 2, "deterministic": True}, {"pipeline": 2}, {"data": 2, "expert": 2}, {"context": 2}], ids=str)
def test_a_hybrid_on_a_mesh_has_the_bits_of_its_engine_on_two_ranks(mesh: dict[str, int], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    create_model(NewModelConfig("qwen3_next", max_position_embeddings=64, num_experts=4, **sizes), 0, tmp_path / "model")
    recipe = {
        "model": {"path": str(tmp_path / "model")}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3}, "parallel": mesh,
        "rollout": {"prompts_per_step": 4, "max_tokens": 8, "engine": {"tensor_parallel_size": 2}}, "algorithm": {"name": "grpo", "group_size": 4},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512}, "run": {"max_steps": 3, "directory": str(tmp_path / "runs")},
    }  # fmt: skip
    rows = read_rows(train(recipe, rewards=[early_letters]).directory / "metrics.jsonl")
    assert len(rows) == 3 and all(row["mismatch_kl"] == 0.0 and row["mismatch_max_abs"] == 0.0 and row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("engine", [{"quantization": "int8"}, {"quantization": "fp8"}, {"quantization": "int8", "tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_grpo_trains_a_mixture_from_rollouts_in_eight_bits_for_ten_steps(family: str, engine: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    create_model(NewModelConfig(family, max_position_embeddings=64, num_experts=4, **sizes), 0, tmp_path / "model")
    recipe = {
        "model": {"path": str(tmp_path / "model")}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "rollout": {"prompts_per_step": 4, "max_tokens": 8, "engine": engine},
        "algorithm": {"name": "grpo", "group_size": 4, "tis_cap": 2.0, "old_logprobs": "recompute"},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512}, "run": {"max_steps": STEPS, "directory": str(tmp_path / "runs")},
    }  # fmt: skip
    result = train(recipe, rewards=[early_letters])
    rows = read_rows(result.directory / "metrics.jsonl")
    assert len(rows) == STEPS and all(0.0 < row["mismatch_kl"] < 0.01 and row["actor/grad_norm"] > 0 for row in rows)
    before, after = dict(read_tensors(tmp_path / "model")), dict(read_tensors(Path(result.model)))
    assert before.keys() == after.keys() and any(".experts." in name and not before[name].equal(tensor) for name, tensor in after.items())


@pytest.mark.full
@pytest.mark.parametrize("max_length", [0, 40], ids=["short", "long"])
def test_engine_and_trainer_of_a_run_have_the_same_longrope_frequencies(max_length: int, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "model"
    make_character_tokenizer(NewModelConfig("phi3").characters, folder)
    factors = {"short_factor": [1.0, 1.1, 1.3, 2.0, 3.0, 5.0], "long_factor": [1.0, 4.0, 9.0, 16.0, 25.0, 60.0]}
    vocabulary = Tokenizer.from_folder(folder).vocab_size
    config = AutoConfig.for_model(
        "phi3", vocab_size=vocabulary, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, original_max_position_embeddings=16, partial_rotary_factor=0.75, tie_word_embeddings=True,
        rope_scaling={"type": "longrope", **factors}, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    recipe = {
        "model": {"path": str(folder), "max_length": max_length}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "rollout": {"prompts_per_step": 4, "max_tokens": 8}, "algorithm": {"name": "grpo", "group_size": 4, "kl_coef": 0.01, "kl_estimator": "k3"},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512}, "run": {"max_steps": 3, "directory": str(tmp_path / "runs")},
    }  # fmt: skip
    result = train(recipe, rewards=[early_letters])
    rows = read_rows(result.directory / "metrics.jsonl")
    assert len(rows) == 3 and all(row["mismatch_kl"] == 0.0 and row["mismatch_max_abs"] == 0.0 for row in rows)
    assert read_shapes(Path(result.model)) == read_shapes(folder)
    words = shlex.split(result.commands[0])
    assert words[words.index("generate") + 2 : words.index("--prompt")] == (["--max-model-len", str(max_length)] if max_length else [])
    assert main(words[words.index("generate") :]) in (0, None)
