"""The model that both sides start from: made and warmed up once by a recipe, that of sort unless another is named, and kept in the work directory."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import yaml
from machine import ROOT

from tandem.config.load import to_mapping
from tandem.config.recipe import Recipe, load_config
from tandem.config.task import REASONING_GYM
from tandem.pod.prompts import context_tokens, prompt_source
from tandem.runtime.callback import Callback

RECIPE = ROOT / "recipes" / "sort.yaml"


def recipe_with(overrides: Sequence[str] = (), recipe: Path = RECIPE) -> Recipe:
    return load_config(recipe, overrides)


def warm_model(work: Path, threads: int = 1, path: Path = RECIPE) -> Path:
    """The folder of the warm model of the recipe in ``path``, made where it is missing; its name changes with what the recipe says of it."""
    import torch

    from tandem.jobs.sft import run_sft_stage, sft_recipe
    from tandem.model.create_model import create_model

    recipe = recipe_with([f"machine.threads={threads}"], path)
    parts = to_mapping(recipe)
    digest = hashlib.sha256(json.dumps([parts[name] for name in ("model", "task", "sft", "run")]).encode()).hexdigest()[:12]
    folder = work / f"start-{digest}"
    if not (folder / "sft" / "model").exists():
        torch.set_num_threads(threads)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        assert recipe.model.create is not None
        create_model(recipe.model.create, recipe.run.seed, folder / "initial")
        stage = sft_recipe(recipe, folder, folder / "initial", context_tokens(recipe.model, recipe.rollout.max_tokens, folder / "initial"))
        run_sft_stage(stage, folder / "sft", Callback(), inline=True, faults=None)
    return folder / "sft" / "model"


def write_run(recipe: Recipe, directory: Path) -> Path:
    """``directory`` with the recipe's ``config.yaml``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(to_mapping(recipe), sort_keys=False), encoding="utf-8")
    return directory


def write_prompts(recipe: Recipe, model: Path, steps: int, path: Path) -> Path:
    """The prompts of the first ``steps`` steps, one JSON object a line, in the order in which both sides use them."""
    with closing(prompt_source(recipe, model)) as source, path.open("w", encoding="utf-8") as file:
        for step in range(steps):
            for prompt in source.for_step(step):
                row = {"prompt": prompt.text, "ground_truth": prompt.ground_truth, "prompt_token_ids": list(prompt.token_ids)}
                file.write(json.dumps(row) + "\n")
    return path


def judge_of(recipe: Recipe) -> str:
    """The name in ``peers/judges.py`` of the recipe's reward."""
    compares = {function.answer.compare for function in recipe.rewards.functions}
    return "numeric" if compares == {"numeric"} else recipe.task.name if recipe.task.name.startswith(REASONING_GYM) else "exact"


def write_peer_settings(recipe: Recipe, directory: Path, threads: int, micro_batches: int = 1) -> Path:
    """What TRL's side is told. ``micro_batches``: the passes in which it takes its update."""
    trainer, algorithm, rollout = recipe.trainer, recipe.algorithm, recipe.rollout
    settings = {
        "threads": threads, "seed": recipe.run.seed, "output": str(directory / "output"),
        "group_size": algorithm.group_size, "prompts_per_step": rollout.prompts_per_step, "max_tokens": rollout.max_tokens,
        "temperature": rollout.temperature, "micro_batches": micro_batches, "kl_coef": algorithm.kl_coef,
        "judge": judge_of(recipe), "learning_rate": trainer.learning_rate, "warmup_steps": trainer.warmup_steps, "beta1": trainer.beta1, "beta2": trainer.beta2,
        "weight_decay": trainer.weight_decay, "max_grad_norm": trainer.max_grad_norm,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path
