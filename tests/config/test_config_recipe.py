"""Combinations of a recipe's sections that are refused because training would contradict them."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.config.load import build, to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe, load_config
from tandem.config.rollout import RolloutConfig
from tandem.types import UserError


def recipe(rollout: dict[str, Any], algorithm: dict[str, Any]) -> Recipe:
    return build(Recipe, {"model": {"path": "m"}, "task": {"name": "sort"}, "rollout": rollout, "algorithm": algorithm})


@pytest.mark.parametrize("filtered", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_filter_at_another_temperature_needs_old_logprobs_of_the_trainer(filtered: dict[str, Any]) -> None:
    capped = {"tis_cap": 2.0}
    with pytest.raises(UserError, match=r"temperature 0.7 and .* set algorithm.old_logprobs to recompute") as caught:
        recipe({"temperature": 0.7, **filtered}, capped)
    assert "\n" not in str(caught.value)
    recipe({"temperature": 0.7, **filtered}, {**capped, "old_logprobs": "recompute"})
    recipe(filtered, capped)
    recipe({"temperature": 0.7}, {})
    with pytest.raises(UserError, match="tis_cap"):
        recipe(filtered, {"old_logprobs": "recompute"})


@pytest.mark.parametrize("name", ["sfft", ["sft"], 3])
def test_an_unknown_algorithm_is_named_before_the_sections_of_another_kind_of_recipe(name: Any) -> None:
    with pytest.raises(UserError) as caught:
        load_config(Path(__file__).parents[2] / "recipes" / "sft.yaml", [f"--algorithm.name={name}"])
    names = "grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo, online_dpo, distillation, pretrain, sft, dpo, reward_model, draft"
    assert str(caught.value) == f"'algorithm.name' is {name!r}; it must be one of {names}"


def test_every_option_of_the_engine_is_reached_from_the_recipe() -> None:
    given = {
        "max_num_seqs": 64, "max_num_batched_tokens": 512, "batching": "dynamic", "enable_chunked_prefill": False, "enable_prefix_caching": False,
        "cache_implementation": "static", "kv_cache_tokens": 4096, "kv_cache_dtype": "int8", "preemption_mode": "swap", "swap_space": 0.5,
        "watermark": 0.1, "tensor_parallel_size": 2, "rank_timeout_s": 9.0,
        "async_scheduling": False, "enforce_eager": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "quantization": "int8+head", "deterministic": False,
    }
    engine = recipe({"engine": given}, {"tis_cap": 2.0, "old_logprobs": "recompute"}).rollout.engine
    assert {name: value for name, value in to_mapping(engine).items() if name in given} == {
        **given, "speculative_config": to_mapping(SpeculativeConfig("ngram", num_speculative_tokens=3)),
    }  # fmt: skip
    decided = {key.removeprefix("engine.") for key in RolloutConfig.refused_keys}
    assert given.keys() | decided == {field.name for field in fields(EngineArgs)} | {"threads"} and not given.keys() & decided


@pytest.mark.parametrize("key", RolloutConfig.refused_keys)
def test_what_the_rollout_decides_itself_is_refused_by_name_with_the_reason(key: str) -> None:
    name = key.removeprefix("engine.")
    default = getattr(EngineArgs(), name, 1)
    with pytest.raises(UserError) as caught:
        recipe({"engine": {name: default}}, {})
    assert str(caught.value) == f"'rollout.engine.{name}' cannot be set: {RolloutConfig.refused_keys[key]}; remove it"


@pytest.mark.parametrize(
    "different", [{"quantization": "int8"}, {"quantization": "bf16"}, {"deterministic": False, "tensor_parallel_size": 2}]
)
def test_an_engine_with_other_log_probabilities_needs_importance_sampling(different: dict[str, Any]) -> None:
    for algorithm in ({}, {"tis_cap": 2.0}, {"old_logprobs": "recompute"}):
        with pytest.raises(UserError, match=r"'rollout.engine.\w+' is .*old_logprobs to recompute"):
            recipe({"engine": different}, algorithm)
    recipe({"engine": different}, {"tis_cap": 2.0, "old_logprobs": "recompute"})


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_a_rollout_has_the_16_bits_of_its_trainer_and_no_other_pair_goes_uncorrected(precision: str) -> None:
    data = {"model": {"path": "m"}, "task": {"name": "sort"}, "trainer": {"precision": precision}}
    int8, corrected = {"rollout": {"engine": {"quantization": "int8"}}}, {"algorithm": {"tis_cap": 2.0, "old_logprobs": "recompute"}}
    if precision == "fp8":
        with pytest.raises(UserError, match=r"'trainer.precision' is 'fp8' and the rollout computes in fp32.*tis_cap"):
            build(Recipe, data)
        assert build(Recipe, {**data, **corrected}).rollout_precision == "fp32"
    else:
        assert build(Recipe, data).rollout_precision == precision
    with pytest.raises(UserError, match="tis_cap"):
        build(Recipe, {**data, **int8})
    assert build(Recipe, {**data, **int8, **corrected}).rollout_precision == "fp32"


def test_batching_without_chunks_needs_a_budget_of_a_whole_prompt() -> None:
    for batching in ({"batching": "static"}, {"batching": "dynamic"}, {"enable_chunked_prefill": False}):
        small = {"engine": {"max_num_batched_tokens": 256, **batching}}
        data = {"model": {"path": "m", "max_length": 257}, "task": {"name": "sort"}}
        with pytest.raises(UserError, match=r"max_num_batched_tokens is 256; without chunked prefill it must be at least max_model_len \(257\)"):
            build(Recipe, {**data, "rollout": small})
        build(Recipe, {**data, "model": {"path": "m", "max_length": 256}, "rollout": small})


def test_a_key_that_a_job_does_not_read_is_refused_by_name() -> None:
    folder = Path(__file__).parents[2] / "recipes"
    for name, kind in (("sft", PretrainRecipe), ("pretrain", PretrainRecipe), ("sort", Recipe)):
        for key, reason in kind.refused_keys.items():
            with pytest.raises(UserError) as caught:
                load_config(folder / f"{name}.yaml", [f"--{key}=1"])
            assert str(caught.value) == f"'{key}' cannot be set: {reason}; remove it"
    with pytest.raises(UserError, match="'demonstrations' is given and there is no section 'task'"):
        load_config(folder / "pretrain.yaml", ["--demonstrations.corrupted_share=0.5"])


def test_a_recipe_is_read_back_from_what_is_saved_with_a_run() -> None:
    for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"):
        loaded = load_config(path, ["model.path=m", "task.path=x"] if path.stem == "dataset" else ())
        saved = to_mapping(loaded)
        assert build(type(loaded), saved) == loaded
        assert "model" not in saved.get("rollout", {}).get("engine", {})


@pytest.mark.parametrize("backend", ["torch", "flash3", "flash4", "xformers"])
def test_an_attention_backend_is_refused_where_it_cannot_compute(backend: str) -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    for name, overrides, says in (
        ("sort", (), "a pod uses one only with machine.device cuda"),
        ("sort", ("machine.device=cuda", "trainer.precision=bf16"), "in a pod needs an engine in 16 bits, and trainer.dtype is 'float32'"),
        ("pretrain", (), "computes in 16 bits, and trainer.precision is 'fp32'"),
        ("pretrain", ("machine.device=cpu",), "needs a GPU, and machine.device is 'cpu'"),
    ):
        with pytest.raises(UserError, match=f"'machine.attention' is '{backend}', which .*{says}"):
            load_config(recipes / f"{name}.yaml", [f"machine.attention={backend}", *overrides])
    load_config(recipes / "pretrain.yaml", [f"machine.attention={backend}", "trainer.precision=bf16"])
    load_config(recipes / "pretrain.yaml", [f"machine.attention={backend}", "trainer.dtype=bfloat16"])
    load_config(recipes / "sort.yaml", [f"machine.attention={backend}", "trainer.dtype=bfloat16", "machine.device=cuda"])


@pytest.mark.parametrize("name", ["sort", "pretrain"])
def test_a_dtype_is_refused_only_where_it_cannot_train(name: str) -> None:
    path = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    for overrides, says in (
        (["trainer.dtype=float16"], "in which squared gradients below 6e-8 are 0"),
        (["trainer.dtype=bfloat16", "trainer.optimizer=adamw8bit"], "decodes its moments to float32"),
        (["trainer.dtype=bfloat16", "trainer.precision=bf16"], "whose weights are float32"),
        (["trainer.dtype=bfloat16", "machine.kernels=cpu"], "'machine.kernels' is 'cpu', which computes in float32"),
    ):
        with pytest.raises(UserError, match=says):
            load_config(path, overrides)
    for optimizer in ("adamw", "muon"):
        load_config(path, ["trainer.dtype=bfloat16", f"trainer.optimizer={optimizer}"])


def test_a_pod_in_float64_is_corrected_and_one_in_16_bits_is_not() -> None:
    data = {"model": {"path": "m"}, "task": {"name": "sort"}}
    build(Recipe, {**data, "trainer": {"dtype": "bfloat16"}})
    with pytest.raises(UserError, match=r"'trainer.dtype' is 'float64', .*set algorithm.tis_cap"):
        build(Recipe, {**data, "trainer": {"dtype": "float64"}})
    build(Recipe, {**data, "trainer": {"dtype": "float64"}, "algorithm": {"tis_cap": 2.0, "old_logprobs": "recompute"}})


@pytest.mark.parametrize(
    ("needs", "overrides", "problem"),
    [
        (["reference"], {"algorithm": {"kl_coef": 0.0}}, "needs the reference model, and algorithm.kl_coef is 0"),
        (["reward_model"], {"algorithm": {"kl_coef": 0.1}}, "needs the reward model, and section 'reward_model' names none"),
    ],
)
def test_a_reward_function_that_needs_a_model_that_is_not_there_is_refused(needs: list[str], overrides: dict[str, Any], problem: str) -> None:
    functions = [{"function": "task"}, {"function": "f.py:f", "needs": needs}]
    data = {"model": {"path": "m"}, "task": {"name": "sort"}, "rewards": {"functions": functions}, **overrides}
    with pytest.raises(UserError) as refused:
        build(Recipe, data)
    assert problem in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(UserError, match="is not called in evaluations; name another function"):
        build(Recipe, {**data, "rewards": {"functions": functions[1:]}})


@pytest.mark.parametrize("overrides", [{"algorithm": {"name": "online_dpo"}}, {"algorithm": {"name": "distillation"}, "reference": {"path": "t"}}])
def test_a_reward_function_may_need_the_reference_of_an_algorithm_that_always_has_one(overrides: dict[str, Any]) -> None:
    functions = [{"function": "task"}, {"function": "f.py:f", "needs": ["reference"]}]
    build(Recipe, {"model": {"path": "m"}, "task": {"name": "sort"}, "rewards": {"functions": functions}, **overrides})


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus"])
def test_dynamic_sampling_of_groups_of_one_is_refused_in_one_line(name: str) -> None:
    data = {"model": {"path": "m"}, "task": {"name": "sort"}, "algorithm": {"name": name, "group_size": 1, "filter_groups": {}}}
    with pytest.raises(UserError, match="the rewards of a group of one never differ") as refused:
        build(Recipe, data)
    assert "\n" not in str(refused.value)
    build(Recipe, {**data, "algorithm": {"name": name, "group_size": 2, "filter_groups": {}}})


REFERRED: dict[str, Any] = {"model": {"path": "m"}, "task": {"name": "sort"}, "algorithm": {"kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("reference", "others", "why"),
    [
        ({"update": "copy", "every_steps": 5}, {"algorithm": {}}, "algorithm.kl_coef is 0, so there is no reference"),
        ({"update": "copy", "every_steps": 200}, {}, "no step has an updated reference"),
        ({"update": "copy"}, {}, "its only update has a KL of 0"),
        ({"update": "ema"}, {"trainer": {"dtype": "bfloat16"}, "machine": {"device": "cuda"}}, "a small step of a mean is rounded away"),
        ({"update": "ema"}, {"trainer": {"router_bias_rate": 0.001}}, "the biases of a router are no weights"),
        ({"update": "ema", "mixup_alpha": 1.0}, {}, "above 0 and below 1"),
        ({"update": "ema", "every_steps": 0}, {}, "'reference.every_steps' is 0"),
        ({"every_steps": 5}, {}, "which is not read: reference.update is 'never'"),
        ({"update": "copy", "every_steps": 5, "mixup_alpha": 0.5}, {}, "which is not read: reference.update is 'copy'"),
        ({"update": "ema", "path": "teacher"}, {}, "only the model that reinforcement learning starts from can follow"),
        ({"path": "teacher"}, {"algorithm": {}}, "algorithm.kl_coef is 0, so there is no reference"),
        ({}, {"algorithm": {"name": "distillation"}}, "there is no teacher"),
        ({"path": "teacher"}, {"algorithm": {"name": "distillation", "kl_coef": 0.1}}, "whose advantage is the KL to the teacher"),
        ({"path": "teacher"}, {"algorithm": {"name": "distillation", "filter_groups": {}}}, "learns from groups of equal rewards too"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_change_or_does_not_exist_is_refused(reference: dict[str, Any], others: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as caught:
        build(Recipe, {**REFERRED, **others, "reference": reference})
    assert "\n" not in str(caught.value)


def test_a_copied_reference_is_accepted_where_a_step_has_a_second_update_or_learns_from_pairs() -> None:
    for algorithm in ({"kl_coef": 0.1, "minibatches": 2}, {"kl_coef": 0.1, "epochs": 2}, {"name": "online_dpo"}):
        assert build(Recipe, {**REFERRED, "algorithm": algorithm, "reference": {"update": "copy"}}).reference.follows
    assert build(Recipe, {**REFERRED, "reference": {"update": "copy", "every_steps": 2}}).reference.follows
    assert build(Recipe, {**REFERRED, "algorithm": {"name": "distillation", "group_size": 1}, "reference": {"path": "teacher"}}).algorithm.needs_reference
