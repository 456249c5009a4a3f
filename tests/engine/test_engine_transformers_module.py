"""The engine with the module of transformers: greedy tokens are those of ``generate``, however they are batched."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_adapters import write_adapter

from tandem.cli.main import main
from tandem.config.implementation import Implementation
from tandem.engine.core.staging import can_stage
from tandem.engine.llm import LLM
from tandem.engine.lora.request import LoRARequest
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.model.huggingface.model_folder import load_model
from tandem.text.characters import make_character_tokenizer
from tandem.types import UserError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
TYPES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"head_dim": 16},
    "exaone4": {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 4},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    "stablelm": {"qk_layernorm": True},
    "starcoder2": {"sliding_window": 20},
}
QUICK = "stablelm"
NEW = 30
SHAPES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 3},
    "preemption": {"kv_cache_tokens": 16 * 8, "max_model_len": 96},
    "swap": {"kv_cache_tokens": 16 * 8, "max_model_len": 96, "swap_space": 0.01, "preemption_mode": "swap"},
    "no prefixes": {"enable_prefix_caching": False, "max_num_seqs": 1, "max_num_batched_tokens": 64},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def saved(model_type: str, folder: Path, vocab_size: int = 40) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, vocab_size=vocab_size, **{**SIZES, **ends, **TYPES[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in TYPES])
def test_greedy_tokens_are_those_of_generate_with_the_same_bits_in_every_batch(model_type: str, tmp_path: Path) -> None:
    peer = saved(model_type, tmp_path)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 40, (n,), generator=draw).tolist() for n in (21, 2, 34, 7, 40)]
    prompts.append([*prompts[2], 5, 6, 7])
    expected = [peer.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    results = {}
    for name, options in {"plain": {}, **SHAPES}.items():
        with LLM(tmp_path, model_impl="transformers", skip_tokenizer_init=True, **{"max_model_len": 96, **options}) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            preempted = llm.engine.stats().num_preemptions
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected, name
        # Where every layer has a window, sequences give blocks back in time.
        assert name not in ("preemption", "swap") or preempted > 0 or model_type == "starcoder2"
        results[name] = [[next(iter(each.values())).logprob for each in output.outputs[0].logprobs or []] for output in outputs]
    assert all(result == results["plain"] for result in results.values())


ADAPTED = {"gpt_neox": ["query_key_value", "dense_4h_to_h"], "qwen3_moe": ["q_proj", "o_proj"], "stablelm": ["v_proj", "gate_proj", "down_proj"]}


def adapter_of_peft(peer: Any, folder: Path, target_modules: list[str]) -> tuple[Any, LoRARequest]:
    """Returns ``peer`` with a random adapter, and the request for it; its folder is written by PEFT."""
    import peft

    number = int(folder.name[-1])
    adapted = peft.get_peft_model(copy.deepcopy(peer), peft.LoraConfig(r=2 + number, lora_alpha=6, target_modules=target_modules, task_type="CAUSAL_LM"))
    draw = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    adapted.save_pretrained(folder)
    return adapted.eval(), LoRARequest(folder.name, number, str(folder))


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in ADAPTED])
def test_requests_with_adapters_have_the_tokens_of_peft_and_in_one_batch_the_bits_of_each_alone(model_type: str, tmp_path: Path) -> None:
    peer = saved(model_type, tmp_path / "base")
    made = [adapter_of_peft(peer, tmp_path / f"adapter-{number}", ADAPTED[model_type]) for number in (1, 2)]
    draw = torch.Generator().manual_seed(1)
    # Two requests with one prompt: blocks of one adapter are not those of the other.
    prompts = [torch.randint(3, 40, (n,), generator=draw).tolist() for n in (21, 34, 7)]
    asked = [(prompts[0], 0), (prompts[1], None), (prompts[1], 1), (prompts[1], 0), (prompts[2], 1)]
    requests = [None if which is None else made[which][1] for _, which in asked]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {"model_impl": "transformers", "skip_tokenizer_init": True, "max_model_len": 96, "enable_lora": True, "max_lora_rank": 4}

    def results(llm: LLM, at: list[int]) -> list[Any]:
        given = [{"prompt_token_ids": asked[i][0]} for i in at]
        outputs = llm.generate(given, params, lora_request=[requests[i] for i in at], use_tqdm=False)
        return [(list(o.outputs[0].token_ids), [next(iter(each.values())).logprob for each in o.outputs[0].logprobs or []]) for o in outputs]

    with LLM(tmp_path / "base", max_loras=2, max_num_batched_tokens=16, max_num_seqs=4, **options) as llm:
        mixed = results(llm, list(range(len(asked))))
        llm.engine.check_integrity()
    for i, (prompt, which) in enumerate(asked):
        theirs = peer if which is None else made[which][0]
        expected = theirs.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        assert mixed[i][0] == expected
    assert len({tuple(tokens) for tokens, _ in mixed}) == len(mixed)
    with LLM(tmp_path / "base", max_loras=1, enable_prefix_caching=False, **options) as llm:
        assert [results(llm, [i])[0] for i in range(len(asked))] == mixed


def test_an_adapter_of_other_matrices_is_refused_with_those_of_the_module(tmp_path: Path) -> None:
    saved("gpt_neox", tmp_path / "base")
    write_adapter(tmp_path / "other", {"q_proj": (64, 64)}, 0, 2)
    with LLM(tmp_path / "base", model_impl="transformers", skip_tokenizer_init=True, max_model_len=96, enable_lora=True) as llm:
        says = r"has the tensor '.*layers\.0\.self_attn\.q_proj\.lora_A\.weight'; linear layers .* are query_key_value, dense, dense_h_to_4h, dense_4h_to_h$"
        with pytest.raises(UserError, match=says):
            llm.generate([{"prompt_token_ids": [1, 2]}], lora_request=LoRARequest("other", 1, str(tmp_path / "other")), use_tqdm=False)


def test_the_command_generates_and_refuses_what_a_module_cannot_do_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789", tmp_path)
    saved(QUICK, tmp_path, vocab_size=42)
    asked = ["generate", str(tmp_path), "--prompt", "abc", "--max-tokens", "4", "--temperature", "0"]
    for options in ([], ["-q", "int8"]):
        assert main([*asked, "--model-impl", "transformers", *options]) in (0, None)
        assert capsys.readouterr().out.strip("\n")
    refused = [
        ([], "model_type 'stablelm'; supported are"), (["--model-impl", "transformers", "-tp", "2"], "engine tensor_parallel_size is 2 and model_impl"),
        (["--model-impl", "transformers", "-q", "int3"], "quantization is 'int3'; it must be one of"),
    ]  # fmt: skip
    for options, says in refused:
        assert main([*asked, *options]) == 2
        error = capsys.readouterr().err
        assert says in error and len(error.splitlines()) == 1


def test_its_kv_blocks_are_not_those_of_an_engine_with_tandems_own_network(make_folder: Callable[..., Path]) -> None:
    layouts = []
    for name in ("transformers", "tandem"):
        with LLM(make_folder("qwen3"), model_impl=name, skip_tokenizer_init=True, digest_weights=True) as llm:
            layouts.append(llm.engine.block_exchange().layout)
    with pytest.raises(UserError, match=r"arithmetic is .* tandem there and .* transformers here"):
        layouts[0].check_equal(layouts[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_staged_beside_steps_where_making_the_twin_changes_no_default(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(QUICK, tmp_path)
    decoder = load_model(tmp_path, select("reference"), dtype=dtype, implemented_by=Implementation("transformers"))
    source: Any = SimpleNamespace(verifies=True)
    assert can_stage(decoder, source) == (dtype == torch.float32)
