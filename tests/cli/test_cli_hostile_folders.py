"""Every command that reads a model's folder refuses one that is wrong in one line that names the thing, its value and what to do, before any work."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from absurd import run_forked
from conftest import Command
from hostile_folders import REMOVED, Change, all_of, commands, config, copied, sharded, tensors, text, tokenizer, truncated, without

Q = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
Case = tuple[Change, str]


def of(changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    return tensors(changed)


OF_CONFIG: dict[str, Case] = {
    "rope type": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "has rope_type 'spiral'; supported are default, linear, llama3"),
    "rope factor": (config(rope_scaling={"rope_type": "linear", "factor": math.nan}), "has factor nan; it must be a number above 0, and finite"),
    "rope theta twice": (config(rope_theta=5.0), "has rope_theta 5.0; rope_parameters has rope_theta 10000.0; remove one of them"),
    "rotary by kind": (config(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "a separate rotary embedding per layer type is not supported"),
    "part of a head": (config(partial_rotary_factor=0.5), "has partial_rotary_factor 0.5; only 1.0 is supported"),
    "soft cap": (config(attn_logit_softcapping=30.0), "has attn_logit_softcapping 30.0; a qwen3 model here has no such term; remove the key if"),
    "kinds of layers": (config(layer_types=["full_attention", "mamba"]), "has layer_types 'mamba'; supported are full_attention and sliding_attention"),
    "too few kinds": (config(layer_types=["full_attention"]), "it must list the kind of each of 2 layers"),
    "bias": (config(attention_bias="yes"), "has attention_bias 'yes'; it must be true or false"),
    "activation": (config(hidden_act="relu"), "has hidden_act 'relu'; only 'silu' is supported for qwen3"),
    "NaN": (config(hidden_size=math.nan), "has hidden_size nan; it must be a whole number of at least 1"),
    "epsilon": (config(rms_norm_eps=math.inf), "has rms_norm_eps inf; it must be a number above 0, and finite"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000: 9,000,000,000 tensors, more than the"),
    "no JSON": (text("config.json", "{'a': 1}"), "cannot be read as JSON"),
    "a list": (text("config.json", "[]"), "contains a JSON list; it must contain an object"),
    "no config": (without("config.json"), r"no config\.json; (it must be a Hugging Face model folder|give a)"),
}  # fmt: skip
OF_WEIGHTS: dict[str, Case] = {
    "family": (config(model_type="qwen4", architectures=["Qwen4ForCausalLM"]), r"(?s)has model_type 'qwen4'; supported are .* model\.implementation: "
               r"transformers \(--model-impl transformers\)\. Did you mean 'qwen3'\?"),
    "quantization": (config(quantization_config={"quant_method": "hqq"}), "has quant_method 'hqq'; supported are awq, gptq|is quanti[sz]ed"),
    "a trillion": (config(hidden_size=10**12), "describes [0-9,]+ parameters, and the files of weights have [0-9,]+ bytes"),
    "biases": (config(attention_bias=True), r"tensor '\S+q_proj\.bias'"),
    "missing": (of(lambda t: {name: x for name, x in t.items() if name != Q}), f"tensor '{Q}'"),
    "shape": (of(lambda t: {**t, Q: torch.zeros(16, 32)}), rf"tensor '{Q}' has shape \[16, 32\]; config\.json requires \[32, 32\]"),
    "dtype": (of(lambda t: {**t, Q: torch.zeros(32, 32, dtype=torch.int32)}), f"'{Q}' is I32; quantized weights are not supported here"),
    "a further one": (of(lambda t: {**t, "größe 🌍": torch.zeros(3)}), "'größe 🌍'"),
    "tied": (of(lambda t: {**t, HEAD: t[EMBEDDING] + 1}), f"'{HEAD}' differs from '{EMBEDDING}'"),
    "half a file": (truncated(0.5), r"model\.safetensors' is broken or truncated"),
    "Git LFS": (text("model.safetensors", LFS), "is a pointer of Git LFS and not the file; run 'git lfs pull'"),
    "shard": (sharded(lambda index: index, drop_shard=True), "has no shard 'model-00002-of-00002.safetensors', which its index lists"),
    "index": (sharded(lambda index: {"weight_map": []}), "has no usable weight_map; download the folder again"),
    "elsewhere": (sharded(lambda index: {"weight_map": dict.fromkeys(index["weight_map"], "../../etc/passwd")}), r"has no shard '\.\./\.\./etc/passwd'"),
}  # fmt: skip
OF_TOKENIZER: dict[str, Case] = {
    "larger": (tokenizer(lambda t: {**t, "model": {**t["model"], "vocab": {**t["model"]["vocab"], "<x>": 1000}}}), "1001 tokens and .* 99; they do not belong"),
    "none": (text("tokenizer.json", "{}"), r"tokenizer\.json' is not a tokenizer"),
    "an end that it lacks": (text("tokenizer_config.json", '{"eos_token": "<none>"}'), "has eos_token '<none>', which tokenizer.json does not know"),
    "an end that is text": (text("generation_config.json", '{"eos_token_id": ["</s>"]}'), r"has eos_token_id \['</s>'\]; it must be a token id or a list of"),
    "ends below 0": (config(eos_token_id=[2, -1]), r"has eos_token_id \[2, -1\]; it must be a token id or a list of them"),
}  # fmt: skip
QUICK = ("generate", "train", "convert", "plan")


def check(case: Case, reading: tuple[str, ...], model: Path, recipe: Path, command: Command, tmp_path: Path) -> None:
    change, says = case
    folder = copied(model, tmp_path / "größe 模型", change)
    for name, line in commands(folder, recipe).items():
        if name in reading:
            refusal = command(*line).refusal()
            assert re.search(says, refusal), (name, refusal)
    assert not (tmp_path / "new").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("case", OF_CONFIG)
def test_a_description_that_is_wrong_is_named(case: str, model: Path, recipe: Path, command: Command, tmp_path: Path) -> None:
    check(OF_CONFIG[case], QUICK, model, recipe, command, tmp_path)


@pytest.mark.parametrize("case", OF_WEIGHTS)
def test_weights_that_are_wrong_are_named_also_by_a_dry_run(case: str, model: Path, recipe: Path, command: Command, tmp_path: Path) -> None:
    check(OF_WEIGHTS[case], ("generate", "train"), model, recipe, command, tmp_path)


@pytest.mark.parametrize("case", OF_TOKENIZER)
def test_a_tokenizer_that_is_wrong_is_named(case: str, model: Path, recipe: Path, command: Command, tmp_path: Path) -> None:
    check(OF_TOKENIZER[case], ("generate", "train"), model, recipe, command, tmp_path)


@pytest.mark.full
def test_the_commands_that_take_longer_refuse_what_is_wrong_in_a_folder_and_leave_nothing_behind(model: Path, recipe: Path, tmp_path: Path) -> None:
    # In a fork each, because ``serve`` would serve what it does not refuse.
    wrong, cases = [], {**OF_CONFIG, **OF_WEIGHTS, **OF_TOKENIZER}
    for name, (change, says) in cases.items():
        folder = copied(model, tmp_path / "größe 模型", change)
        for command_name, line in commands(folder, recipe).items():
            if command_name not in ("serve", *(() if name in OF_TOKENIZER else ("quantize",)), *(("plan serving",) if name in OF_CONFIG else ())):
                continue
            outcome = run_forked(line, cwd=tmp_path, limit_s=30)
            if outcome.kind != "refused" or not re.search(says, outcome.err) or (tmp_path / "new").exists():
                wrong.append((name, command_name, outcome.kind, outcome.err[:300]))
    assert wrong == []


BY_TRANSFORMERS: dict[str, Case] = {
    "family": (config(model_type="qwen4", architectures=["Qwen4ForCausalLM"]), "has no model_type 'qwen4'; a newer version may have it"),
    "a list": (config(model_type=["qwen3"]), r"has no model_type \['qwen3'\]; a newer version may have it"),
    "state": (config(model_type="mamba2", architectures=["Mamba2ForCausalLM"], layer_types=REMOVED), "cannot be computed by transformers"),
    "rope type": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "cannot be computed by transformers .*spiral"),
    "rope factor": (config(rope_scaling={"rope_type": "linear", "factor": 0}), "its rotary embedding has factor 0; it must be a number above 0, and finite"),
    "theta": (config(rope_parameters={"rope_type": "default", "rope_theta": -1}), "its rotary embedding has rope_theta -1; it must be a number above 0"),
    "missing": (of(lambda t: {name: x for name, x in t.items() if name != Q}), f"tensor '{Q}' is missing"),
    "half a file": (truncated(0.5), r"model\.safetensors' is broken or truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_TRANSFORMERS)
def test_what_a_module_of_transformers_cannot_be_made_of_is_named_without_its_own_warnings(
    case: str, model: Path, recipe: Path, command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    check(BY_TRANSFORMERS[case], ("generate by transformers",), model, recipe, command, tmp_path)


def test_what_is_no_folder_is_named(model: Path, recipe: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "file.safetensors").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    no_folder = r"is a file; name the|is not a folder|is no Hugging Face folder|symbolic links"
    for name, says in {"file.safetensors": no_folder, "empty": r"no config\.json", "loop": no_folder}.items():
        for at, line in commands(tmp_path / name, recipe).items():
            if at in (*QUICK, "quantize", "generate by transformers"):
                refusal = command(*line).refusal()
                assert re.search(says, refusal) and name in refusal, (at, refusal)


def test_folders_with_any_name_and_several_ends_are_read(model: Path, command: Command, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "größe 🌍 'a\" b", all_of(text("generation_config.json", json.dumps({"eos_token_id": [2, 1, 0]}))))
    assert command("generate", folder, "--prompt", "1=", "--max-tokens", "2").code == 0
