"""Adapters per request: each gives the results of merged weights, alone or in a batch, and never uses blocks of another."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import named, with_kernels
from lora_adapters import SCALE, write_adapter, write_merged

from tandem import LLM, LoRARequest, SamplingParams
from tandem.config.lora import ATTENTION_MODULES, LINEAR_ATTENTION_MODULES, LoraConfig
from tandem.layout.parameters import is_of_adapter, parameters
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.peft_folder import save_adapter
from tandem.types import UserError

PROMPTS = ["sort 4 1 9 2", "a prompt of 16 ch", "the quick brown fox jumps over the lazy dog", "q"]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(n=2, max_tokens=40, seed=3, ignore_eos=True)
SIZES = {"q_proj": (64, 32), "v_proj": (32, 32), "o_proj": (32, 64), "up_proj": (48, 32), "down_proj": (32, 48)}


def make_adapter(folder: Path, seed: int, rank: int = 3) -> LoRARequest:
    return LoRARequest(folder.name, int(folder.name[-1]), str(write_adapter(folder, SIZES, seed, rank)))


def merged(base: Path, adapter: LoRARequest, to: Path) -> LLM:
    """Returns an engine with the base model's weights and the merged adapter."""
    return LLM(write_merged(base, Path(adapter.lora_path), to), max_num_seqs=16, max_num_batched_tokens=64)


@pytest.fixture
def lora_llm(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return lambda *model, **settings: make_llm(*model, **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, **settings})


@pytest.fixture
def adapters(tmp_path: Path) -> list[LoRARequest]:
    return [make_adapter(tmp_path / f"adapter-{i}", i) for i in (1, 2)]


def run(llm: LLM, prompts: list[str], adapters: Any, params: SamplingParams = SAMPLED, **more: Any) -> list[Any]:
    answers = llm.generate(prompts, params, lora_request=adapters, **more)
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


def expect_alike(ours: list[Any], theirs: list[Any]) -> None:
    for (mine,), (other,) in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_an_adapter_does_what_merged_weights_do(lora_llm, make_folder, adapters, tmp_path, kernels) -> None:
    llm = lora_llm(kernels=kernels)
    without = run(llm, PROMPTS, None, GREEDY)
    for adapter in adapters:
        ours = run(llm, PROMPTS, adapter, GREEDY)
        assert [c.token_ids for (c,) in ours] != [c.token_ids for (c,) in without]
        expect_alike(ours, run(merged(make_folder(), adapter, tmp_path / f"m{adapter.lora_int_id}"), PROMPTS, None, GREEDY))


MIXED = named(
    {}, {"max_num_batched_tokens": 16}, {"kv_cache_tokens": 128}, {"max_num_seqs": 3, "enable_prefix_caching": False},
    {"kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap", "speculative_config": {"method": "draft", "model": 0}},
)


@with_kernels(MIXED, quick=["max_num_batched_tokens=16"])
def test_a_mixed_batch_has_the_bits_of_each_request_alone(lora_llm, make_llm, adapters, kernels, settings) -> None:
    asked = [adapters[0], None, adapters[1], adapters[0]]
    mixed = run(lora_llm(kernels=kernels, **settings), PROMPTS, asked)
    for key, (prompt, adapter) in enumerate(zip(PROMPTS, asked, strict=True)):
        alone = lora_llm(kernels=kernels) if adapter is not None else make_llm(kernels=kernels)
        assert run(alone, [prompt], adapter, request_keys=[key]) == [mixed[key]]


def test_an_updated_adapter_reaches_the_engine_and_meets_no_old_block(lora_llm, make_folder, adapters, tmp_path) -> None:
    llm, adapter = lora_llm(), adapters[0]
    run(llm, PROMPTS, adapter, GREEDY)
    assert [answer.num_cached_tokens for answer in llm.generate(PROMPTS, GREEDY, lora_request=adapter)] == [0, 16, 32, 0]
    before = llm.engine.list_loras()
    make_adapter(Path(adapter.lora_path), 77)
    answers = llm.generate(PROMPTS, GREEDY, lora_request=adapter)
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 0, 0]
    assert llm.engine.list_loras().keys() == before.keys() and llm.engine.list_loras() != before
    theirs = run(merged(make_folder(), adapter, tmp_path / "merged"), PROMPTS, None, GREEDY)
    expect_alike([answer.outputs for answer in answers], theirs)


def test_adapters_and_the_base_model_share_no_block(lora_llm, adapters) -> None:
    llm = lora_llm()
    for adapter in (None, *adapters):
        answers = llm.generate(PROMPTS, GREEDY, lora_request=adapter)
        assert {answer.num_cached_tokens for answer in answers} == {0}


def test_a_request_under_way_goes_on_with_the_new_content(lora_llm, adapters, tmp_path) -> None:
    llm, adapter = lora_llm(), adapters[0]
    engine = llm.engine
    prompt = engine.tokenizer.encode(PROMPTS[2])
    engine.add_request("a", prompt, GREEDY, lora_request=adapter)
    for _ in range(10):
        engine.step()
    make_adapter(Path(adapter.lora_path), 78)
    engine.add_lora(adapter)
    answers: list[Any] = []
    while not answers:
        answers = engine.step()
    engine.check_integrity()
    tokens = list(answers[0].outputs[0].token_ids)
    fresh = lora_llm()
    rest = fresh.generate(
        {"prompt_token_ids": prompt + tokens[:10]}, SamplingParams(max_tokens=14, temperature=0, ignore_eos=True),
        lora_request=adapter,
    )  # fmt: skip
    assert tokens[10:] == list(rest[0].outputs[0].token_ids)
    assert answers[0].outputs[0].raw_logprobs[10:] == rest[0].outputs[0].raw_logprobs


def test_the_adapter_used_least_recently_makes_room(lora_llm, adapters, tmp_path) -> None:
    llm = lora_llm()
    first = run(llm, PROMPTS, adapters[0], GREEDY)
    run(llm, PROMPTS, adapters[1], GREEDY)
    run(llm, PROMPTS[:1], adapters[0], GREEDY)
    third = make_adapter(tmp_path / "adapter-3", 3)
    run(llm, PROMPTS, third, GREEDY)
    assert set(llm.engine.list_loras()) == {"adapter-1", "adapter-3"}
    assert run(llm, PROMPTS, adapters[0], GREEDY) == first


def test_what_cannot_be_served_is_one_clear_line(lora_llm, make_llm, adapters, tmp_path) -> None:
    llm = lora_llm()
    with pytest.raises(UserError, match="start it with enable_lora=True"):
        run(make_llm(), PROMPTS, adapters[0])
    third = make_adapter(tmp_path / "adapter-3", 3)
    with pytest.raises(UserError, match="3 adapters; this engine holds 2: raise max_loras"):
        run(llm, PROMPTS, [*adapters, third, None])
    with pytest.raises(UserError, match="2 entries for 4 prompts"):
        run(llm, PROMPTS, adapters)
    with pytest.raises(UserError, match="rank 9; this engine allows at most 4; raise max_lora_rank"):
        run(llm, PROMPTS, make_adapter(tmp_path / "adapter-9", 3, rank=9))
    run(llm, PROMPTS, adapters[0])
    with pytest.raises(UserError, match="give each adapter one name and one id"):
        run(llm, PROMPTS, LoRARequest("other", 1, adapters[0].lora_path))
    assert not llm.engine.has_unfinished_requests
    for bad in ({"lora_name": ""}, {"lora_int_id": 0}, {"lora_path": ""}):
        with pytest.raises(UserError, match=next(iter(bad))):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "x", **bad})


def test_an_adapter_in_use_is_neither_removed_nor_evicted(lora_llm, adapters, tmp_path) -> None:
    engine = lora_llm().engine
    prompt = engine.tokenizer.encode(PROMPTS[0])
    for adapter in adapters:
        engine.add_request(adapter.lora_name, prompt, GREEDY, lora_request=adapter)
    with pytest.raises(UserError, match="used by in-flight requests"):
        engine.remove_lora("adapter-1")
    with pytest.raises(UserError, match="'adapter-3' has no free slot: 2 adapters are in use"):
        engine.add_lora(make_adapter(tmp_path / "adapter-3", 3))
    while engine.has_unfinished_requests:
        engine.step()
    engine.remove_lora("adapter-1")
    assert set(engine.list_loras()) == {"adapter-2"}
    with pytest.raises(UserError, match="'adapter-1' is not loaded"):
        engine.remove_lora("adapter-1")


@pytest.mark.full
@pytest.mark.parametrize("deterministic", [True, False])
def test_adapters_reach_every_rank(lora_llm, adapters, deterministic) -> None:
    one, asked = lora_llm(), [adapters[0], None, adapters[1], adapters[0]]
    with contextlib.closing(lora_llm(tensor_parallel_size=2, deterministic=deterministic)) as two:
        for seed in (1, 79):
            make_adapter(Path(adapters[0].lora_path), seed)
            ours, theirs = (run(llm, PROMPTS, asked) for llm in (two, one))
            assert (ours == theirs) is deterministic
            pairs = [pair for mine, other in zip(ours, theirs, strict=True) for pair in zip(mine, other, strict=True)]
            for mine, other in pairs:
                assert mine.token_ids == other.token_ids
                assert mine.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-5)
        two.engine.remove_lora("adapter-1")
        assert run(two, PROMPTS[:1], None)[0][0].token_ids == run(one, PROMPTS[:1], None)[0][0].token_ids


def hybrid_adapter(folder: Path, base: Path, seed: int) -> LoRARequest:
    """Writes an adapter of all matrices of softmax and of linear attention."""
    lora, generator = LoraConfig(3, 3 * SCALE, target_modules=(*ATTENTION_MODULES, *LINEAR_ATTENTION_MODULES)), torch.Generator().manual_seed(seed)
    shapes = replace(read_shapes(base), lora=lora)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in parameters(shapes) if is_of_adapter(name)}
    save_adapter(tensors, shapes, folder, base)
    return LoRARequest(folder.name, int(folder.name[-1]), str(folder))


@pytest.mark.full
def test_adapters_of_a_hybrid_do_what_merged_weights_do_alone_in_a_batch_and_on_two_ranks(lora_llm, make_folder, tmp_path) -> None:
    folder = make_folder("qwen3_next")
    adapters = [hybrid_adapter(tmp_path / f"adapter-{i}", folder, i) for i in (1, 2)]
    asked, llm = [adapters[0], None, adapters[1], adapters[0]], lora_llm("qwen3_next")
    without = run(llm, PROMPTS, None, GREEDY)
    for adapter in adapters:
        ours = run(llm, PROMPTS, adapter, GREEDY)
        assert [c.token_ids for (c,) in ours] != [c.token_ids for (c,) in without]
        expect_alike(ours, run(merged(folder, adapter, tmp_path / f"m{adapter.lora_int_id}"), PROMPTS, None, GREEDY))
    mixed = run(llm, PROMPTS, asked)
    for key, (prompt, adapter) in enumerate(zip(PROMPTS, asked, strict=True)):
        assert run(llm, [prompt], adapter, request_keys=[key]) == [mixed[key]]
    with contextlib.closing(lora_llm("qwen3_next", tensor_parallel_size=2)) as two:
        assert run(two, PROMPTS, asked) == mixed
