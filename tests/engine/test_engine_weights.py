"""Weight updates: every token has a version, a forward pass has one version, and no stale block is used."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.engine.kv_cache.block_pool import BlockPool
from tandem.engine.llm import DUMMY_VERSION, LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import UserError, WeightVersion

PROMPTS = ["sort 4 1 9 2", "the quick brown fox jumps over the lazy dog"]
NEW = WeightVersion(0, 1)


def outputs(llm: LLM, params: SamplingParams) -> list[object]:
    return [[(c.token_ids, c.raw_logprobs, c.sampling_logprobs) for c in answer.outputs] for answer in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_updated_engine_equals_one_that_started_with_the_weights(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM], architecture: str, kernels: str
) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=30)
    expected = outputs(make_llm(architecture, 1, kernels=kernels), params)
    for start in ("auto", "dummy"):
        llm = make_llm(architecture, 0, load_format=start, kernels=kernels)
        assert llm.weight_version == (DUMMY_VERSION if start == "dummy" else (0, 0))
        assert outputs(llm, params) != expected
        llm.update_weights(dict(read_tensors(make_folder(architecture, 1))), NEW)
        assert llm.weight_version == NEW
        assert outputs(llm, params) == expected


def test_a_stale_block_never_matches_even_where_nothing_is_flushed(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPool, "reset_prefix_cache", lambda self: None)
    params = SamplingParams(n=2, seed=1, max_tokens=30)
    llm = make_llm()
    before = outputs(llm, params)
    llm.update_weights(read_tensors(make_folder("qwen3", 1)), NEW)
    assert [answer.num_cached_tokens for answer in llm.generate(PROMPTS, params)] == [0, 0]
    assert outputs(llm, params) == outputs(make_llm(weights=1), params)
    llm.update_weights(read_tensors(make_folder("qwen3", 0)), WeightVersion(0, 2))
    assert outputs(llm, params) == before


def test_a_stale_weight_is_seen(make_folder: Callable[..., Path], make_llm: Callable[..., LLM]) -> None:
    """The comparison can fail: one tensor of the old weights makes it fail."""
    params = SamplingParams(n=2, seed=1, max_tokens=30)
    tensors = dict(read_tensors(make_folder("qwen3", 1)))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = dict(read_tensors(make_folder("qwen3", 0)))[name]
    llm = make_llm()
    llm.update_weights(tensors, NEW)
    assert outputs(llm, params) != outputs(make_llm(weights=1), params)


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
def test_running_requests_keep_their_tokens_and_go_on_under_the_new_weights(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM], steps: int
) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=40, ignore_eos=True)
    llm = make_llm(max_num_batched_tokens=24)
    engine = llm.engine
    assert engine.tokenizer is not None
    for key, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, engine.tokenizer.encode(prompt), params, key=key)
    for _ in range(steps):
        engine.step()
    llm.update_weights(read_tensors(make_folder("qwen3", 1)), NEW)
    engine.check_integrity()
    answers = {}
    while engine.has_unfinished_requests:
        answers.update((output.request_id, output) for output in engine.step())
    engine.check_integrity()
    old, new = make_llm(), make_llm(weights=1)
    for key, prompt in enumerate(PROMPTS):
        tokens = answers[prompt].prompt_token_ids
        (start,) = old.generate(prompt, params, request_keys=[key])
        for completion, before in zip(answers[prompt].outputs, start.outputs, strict=True):
            kept = completion.weight_versions.count((0, 0))
            assert completion.weight_versions == [WeightVersion(0, 0)] * kept + [NEW] * (40 - kept)
            assert completion.token_ids[:kept] == before.token_ids[:kept]
            assert completion.raw_logprobs[:kept] == before.raw_logprobs[:kept]
            rest = SamplingParams(seed=1, max_tokens=40 - kept, ignore_eos=True)
            new.engine.add_request("rest", tokens + completion.token_ids[:kept], rest, key=key, first_index=completion.index)
            found = []
            while not found:
                found = new.engine.step()
            assert completion.token_ids[kept:] == found[0].outputs[0].token_ids
            assert completion.raw_logprobs[kept:] == found[0].outputs[0].raw_logprobs


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    params = SamplingParams(seed=1, max_tokens=20)
    llm = make_llm()
    expected = outputs(llm, params)
    tensors = dict(read_tensors(make_folder("qwen3", 1)))
    tensors["model.norm.weight"] = torch.ones(5)
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        llm.update_weights(tensors, NEW)
    assert llm.weight_version == (0, 0) and outputs(llm, params) == expected
