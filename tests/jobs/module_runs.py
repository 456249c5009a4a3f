"""Models and recipes of runs with ``model.implementation: transformers``."""

from pathlib import Path
from typing import Any

import torch
from data_runs import rows, write_sections

from tandem.config.recipe import load_config
from tandem.jobs.start import train
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import Tokenizer

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
