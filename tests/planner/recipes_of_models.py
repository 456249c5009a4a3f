"""A recipe of reinforcement learning with a model of a size that needs GPUs, of which only ``config.json`` is there."""

import json
from pathlib import Path

import yaml

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def grpo_recipe(folder: Path, **sections: dict[str, object]) -> Path:
    """Writes a recipe of GRPO on Llama 3 8B, with ``sections`` beside or in place of its own."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    recipe: dict[str, object] = {
        "model": {"path": str(model), "max_length": 4096}, "task": {"name": "sort"}, "rollout": {"prompts_per_step": 64, "max_tokens": 3072},
        "algorithm": {"name": "grpo", "group_size": 8, "kl_coef": 0.01}, "run": {"max_steps": 100},
    }
    file = folder / "grpo.yaml"
    file.write_text(yaml.safe_dump(recipe | sections))
    return file
