"""A key that another key turns off is refused by name, with the reason and the remedy; as soon as it is read, it is accepted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.config.load import build, to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe, load_config
from tandem.jobs.sft import sft_recipe
from tandem.types import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
RL: dict[str, Any] = {"model": {"path": "model"}, "task": {"name": "sort"}}
DATA: dict[str, Any] = {"algorithm": {"name": "pretrain"}, "model": {"path": "model"}, "data": {"train": [{"path": "data"}]}}
DEMONSTRATED: dict[str, Any] = {"algorithm": {"name": "sft"}, "model": {"path": "model"}, "task": {"name": "sort"}}

# (the recipe, the key, its value, the reason, what must be set for it to be read)
UNREAD: list[tuple[dict[str, Any], str, Any, str, dict[str, Any]]] = [
    (RL, "trainer.muon_momentum", 0.9, "trainer.optimizer is 'adamw'", {"trainer.optimizer": "muon"}),
    (DATA, "trainer.muon_iterations", 3, "trainer.optimizer is 'adamw'", {"trainer.optimizer": "muon"}),
    (RL, "trainer.loss_scale", 1024.0, "trainer.precision is 'fp32'", {"trainer.precision": "fp16"}),
    (RL, "trainer.loss_scale_growth_steps", 10, "trainer.precision is 'fp32'", {"trainer.precision": "fp16"}),
    (RL, "trainer.decay_steps", 10, "trainer.schedule is 'constant'", {"trainer.schedule": "wsd"}),
    (RL, "trainer.min_lr_ratio", 0.1, "the learning rate is constant", {"trainer.schedule": "cosine"}),
    (RL, "trainer.min_lr_ratio", 0.1, "the learning rate is constant", {"sft.schedule": "linear"}),
    (DATA, "trainer.min_lr_ratio", 0.1, "the learning rate is constant", {"trainer.schedule": "linear"}),
    (RL, "algorithm.advantage_epsilon", 0.1, "algorithm.name is 'dr_grpo'", {"algorithm.name": "grpo"}),
    (RL, "algorithm.length_constant", 9, "loss_agg_mode is 'token-mean'", {"algorithm.loss_agg_mode": "seq-mean-token-sum-norm"}),
    (RL, "algorithm.kl_estimator", "k1", "algorithm.kl_coef is 0", {"algorithm.kl_coef": 0.1}),
    (RL, "algorithm.kl_in_reward", True, "algorithm.kl_coef is 0", {"algorithm.kl_coef": 0.1}),
    (RL, "algorithm.mirror_descent_tau", 0.5, "policy_loss is 'clip'", {"algorithm.policy_loss": "mirror_descent"}),
    (RL, "algorithm.clip_ratio_high", 0.3, "policy_loss is 'mirror_descent'", {"algorithm.policy_loss": "cispo"}),
    (RL, "algorithm.importance_level", "sequence", "policy_loss is 'mirror_descent'", {"algorithm.policy_loss": "clip"}),
    (RL, "algorithm.dual_clip", 3.0, "policy_loss is 'cispo'", {"algorithm.policy_loss": "clip"}),
    (RL, "algorithm.tis_level", "sequence", "algorithm.tis_cap is empty", {"algorithm.tis_cap": 2.0}),
    (RL, "parallel.schedule", "gpipe", "parallel.pipeline is 1", {"parallel.pipeline": 2}),
    (RL, "parallel.sequence_parallel", False, "parallel.tensor is 1", {"parallel.tensor": 2}),
    (DATA, "trainer.share_prompts", True, "algorithm.name is 'pretrain'", {"algorithm.name": "dpo"}),
    (DATA, "parallel.deterministic", True, "parallel.tensor is 1", {"parallel.tensor": 2}),
    (RL, "parallel.across_nodes", True, "all ranks (1) are on one machine", {"parallel.data": 2, "parallel.ranks_per_node": 1}),
    (RL, "registry.name", "small", "there is no registry", {"registry.path": "registry"}),
    (RL, "coordination.prefix", "/mine/", "'coordination.store' is 'embedded'", {"coordination.store": "etcd"}),
    (RL, "task.prompt_key", "question", "task.name is 'sort'", {"task.name": "dataset", "task.path": "prompts.jsonl"}),
    (RL, "rollout.engine.swap_space", 1.0, "preemption_mode is 'recompute'", {"rollout.engine.preemption_mode": "swap"}),
]  # fmt: skip
OTHER = {
    "algorithm.advantage_epsilon": {"algorithm.name": "dr_grpo"}, "algorithm.clip_ratio_high": {"algorithm.policy_loss": "mirror_descent"},
    "algorithm.importance_level": {"algorithm.policy_loss": "mirror_descent"}, "algorithm.dual_clip": {"algorithm.policy_loss": "cispo"},
    "rollout.engine.swap_space": {"rollout.engine.preemption_mode": "recompute"},
}  # fmt: skip


def load(folder: Path, recipe: dict[str, Any], keys: dict[str, Any]) -> Recipe | PretrainRecipe:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return load_config(folder / "recipe.yaml", [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()])


@pytest.mark.parametrize(("recipe", "key", "value", "reason", "read"), UNREAD, ids=[f"{row[1]} {', '.join(row[4])}" for row in UNREAD])
def test_a_key_is_refused_where_it_is_not_read_and_accepted_where_it_is(
    recipe: dict[str, Any], key: str, value: Any, reason: str, read: dict[str, Any], tmp_path: Path
) -> None:
    switched_off = {**OTHER.get(key, {})}
    with pytest.raises(UserError) as caught:
        load(tmp_path, recipe, {**switched_off, key: value})
    message = str(caught.value)
    assert key.removeprefix("rollout.") in message.split(" is ")[0] and "which is not read: " in message and reason in message
    assert message.endswith("remove the key") and "\n" not in message
    section, name = key.rsplit(".", 1)
    loaded = load(tmp_path, recipe, {**switched_off, **read, **({"trainer.decay_steps": 10} if "wsd" in read.values() else {}), key: value})
    for part in section.split("."):
        loaded = getattr(loaded, part)
    assert getattr(loaded, name) == value


@pytest.mark.parametrize(
    ("recipe", "keys", "named"),
    [
        (DEMONSTRATED, {"evaluation.every_steps": 5}, "'evaluation.every_steps' is 5"),
        (DEMONSTRATED, {"data.held_out": "data"}, "'data.held_out' is 'data'"),
        (DATA, {"trainer.router_replay": "disabled"}, "'trainer.router_replay' is 'disabled'"),
        (RL, {"parallel.pipeline_layers": [5]}, "'parallel.pipeline_layers' is"),
        (RL, {"task.name": "dataset", "task.path": "a", "task.eval_path": "b", "task.held_out_share": 0.2}, "'task.held_out_share' is 0.2"),
        (RL, {"run.trace_steps": [200]}, "'run.trace_steps' has 200"),
    ],
)
def test_a_value_without_effect_is_named_on_one_line(recipe: dict[str, Any], keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, recipe, keys)
    assert str(caught.value).startswith(named) and "\n" not in str(caught.value)


def test_options_of_adapters_and_of_looked_up_drafts_are_refused_without_them() -> None:
    with pytest.raises(UserError, match=r"'engine.max_loras' is 2, which is not read: engine.enable_lora is false"):
        build(EngineArgs, {"max_loras": 2})
    build(EngineArgs, {"max_loras": 2, "enable_lora": True})
    with pytest.raises(UserError, match=r"'speculative_config.prompt_lookup_max' is 9, which is not read: method is 'draft'"):
        build(SpeculativeConfig, {"method": "draft", "model": "m", "prompt_lookup_max": 9})


def test_the_stage_before_reinforcement_learning_is_saved_without_keys_that_it_does_not_read(tmp_path: Path) -> None:
    options = [
        "--trainer.schedule=wsd", "--trainer.decay_steps=9", "--trainer.min_lr_ratio=0.1", "--residents.plan=offload",
        f"--trainer.offload_folder={tmp_path}", "--run.trace_steps=[150]", "--sft.steps=20",
    ]  # fmt: skip
    for schedule, ratio in (("constant", 0.0), ("linear", 0.1)):
        recipe = load_config(RECIPES / "sort.yaml", [*options, f"--sft.schedule={schedule}"])
        assert isinstance(recipe, Recipe)
        stage = sft_recipe(recipe, tmp_path, tmp_path / "model", 64)
        assert build(PretrainRecipe, to_mapping(stage)) == stage and stage.trainer.min_lr_ratio == ratio


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_of_the_repository_loads_and_is_read_back_as_it_was_saved(path: Path) -> None:
    recipe = load_config(path)
    assert build(type(recipe), to_mapping(recipe)) == recipe


def test_a_section_that_is_not_read_is_named_and_a_created_model_has_no_layer_that_drafts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^'rollout.engine.speculative_config' is given, which is not read: 'rollout.backend' is 'vllm'"):
        load(tmp_path, RL, {"rollout.backend": "vllm", "rollout.engine.speculative_config": "{method: ngram}"})
    with pytest.raises(UserError, match=r"speculative_config.method' is 'mtp' and section 'model.create' makes a model with no layer of multi-token"):
        load_config("sort", ["--rollout.engine.speculative_config={method: mtp}"])
    with pytest.raises(UserError, match=r"'mtp' and section 'sft' makes a model with no layer of multi-token"):
        load(tmp_path, RL, {"rollout.engine.speculative_config": "{method: mtp}", "sft.steps": "30"})
