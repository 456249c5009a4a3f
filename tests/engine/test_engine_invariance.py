"""Every token and every bit of a log-probability is independent of what the engine does besides the request."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import REFERENCE_IS_SLOW, named, with_kernels

from tandem.engine.core.lifecycle import Transition
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import UserError, WeightVersion
from tandem.types.kv_cache import KV_CACHE_DTYPES

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog", "a prompt of 16 ch", "x" * 48]
BASE = SamplingParams(n=3, max_tokens=60, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True)
RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "prompt_logprobs": 2},
    {"bad_words": ["e", "th", "1 2"], "logprobs": 2},
    {"presence_penalty": 0.7, "allowed_token_ids": list(range(3, 30))},
    {"structured_outputs": StructuredOutputsParams(regex="[a-f ]{20}([0-9]{2}x?)*")},
]
PARAMS = {prompt: replace(BASE, **rules) for prompt, rules in zip(PROMPTS, RULES, strict=True)}
"""Every prompt has rules of its own, so that they stand side by side in a batch."""


def completions(answers: list[RequestOutput]) -> list[list[CompletionOutput]]:
    return [answer.outputs for answer in answers]


def generate(llm: LLM, prompts: list[str] = PROMPTS, keys: list[int] | None = None) -> list[list[CompletionOutput]]:
    answers = llm.generate(prompts, [PARAMS[prompt] for prompt in prompts], request_keys=keys)
    llm.engine.check_integrity()
    return completions(answers)


@pytest.fixture(params=["reference", "auto"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[name if name == "int4" else pytest.param(name, marks=pytest.mark.full) for name in KV_CACHE_DTYPES])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[CompletionOutput]]]:
    return {}


@pytest.fixture
def expected(
    make_llm: Callable[..., LLM], kernels: str, known: dict[str, list[list[CompletionOutput]]]
) -> list[list[CompletionOutput]]:
    """The completions of a separate engine with default settings, for each set of kernels."""
    if kernels not in known:
        known[kernels] = generate(make_llm(kernels=kernels))
    return known[kernels]


SETTINGS = named(
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 23},
    {"max_num_batched_tokens": 4096, "max_num_seqs": 64},
    {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 128, "enable_chunked_prefill": False},
    {"kv_cache_tokens": 128},
    {"kv_cache_tokens": 128, "enable_prefix_caching": False, "max_num_batched_tokens": 17},
    {"kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap"},
    {"kv_cache_tokens": 128, "swap_space": 2**-15, "preemption_mode": "swap", "enable_prefix_caching": False, "max_num_batched_tokens": 17},
    {"kv_cache_tokens": 128, "swap_space": 2**-12, "enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    {"batching": "dynamic", "max_num_batched_tokens": 128, "max_num_seqs": 4},
    {"batching": "static", "max_num_batched_tokens": 128, "max_num_seqs": 4},
    {"batching": "static", "max_num_batched_tokens": 128, "kv_cache_tokens": 192},
    {"cache_implementation": "static", "kv_cache_tokens": 512},
    {"cache_implementation": "static", "batching": "static", "max_num_batched_tokens": 128, "kv_cache_tokens": 384},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 7}, "kv_cache_tokens": 128},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}, "kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap"},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}, "max_num_batched_tokens": 16},
    {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}, "cache_implementation": "static", "enable_prefix_caching": False},
    {"speculative_config": {"method": "draft", "model": 0}},
    {"speculative_config": {"method": "draft", "model": 1}, "max_num_batched_tokens": 16, "kv_cache_tokens": 128},
    {"speculative_config": {"method": "draft", "model": 0}, "kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap"},
)
WITH_THE_REFERENCE = named({"kv_cache_tokens": 128, "enable_prefix_caching": False, "max_num_batched_tokens": 17})


@with_kernels(SETTINGS, quick=WITH_THE_REFERENCE)
def test_settings_change_no_bit(
    make_llm: Callable[..., LLM], kernels: str, expected: list[list[CompletionOutput]], settings: dict[str, Any]
) -> None:
    assert generate(make_llm(kernels=kernels, **settings)) == expected


@pytest.mark.parametrize("kernels", REFERENCE_IS_SLOW)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_settings_change_no_bit_of_a_mixture_of_experts(
    make_llm: Callable[..., LLM], kernels: str, architecture: str
) -> None:
    expected = generate(make_llm(architecture, kernels=kernels))
    for settings in ({"max_num_batched_tokens": 16}, {"max_num_seqs": 3}, {"kv_cache_tokens": 128}):
        assert generate(make_llm(architecture, kernels=kernels, **settings)) == expected


@pytest.mark.parametrize("kernels", REFERENCE_IS_SLOW)
def test_settings_change_no_bit_of_an_engine_that_keeps_keys_and_values_in_less(
    make_llm: Callable[..., LLM], kernels: str, kv_cache_dtype: str
) -> None:
    def make(**settings: Any) -> LLM:
        return make_llm(kernels=kernels, kv_cache_dtype=kv_cache_dtype, **settings)

    llm = make()
    expected = generate(llm)
    assert completions(llm.generate(PROMPTS, list(PARAMS.values()))) == expected, "warm"
    assert generate(make(max_num_batched_tokens=23)) == expected, "in chunks"
    assert generate(make(kv_cache_tokens=128, enable_prefix_caching=False, max_num_batched_tokens=17)) == expected, "preempted"
    assert generate(make(kv_cache_tokens=128, preemption_mode="swap", swap_space=2**-12)) == expected, "swapped"
    assert generate(make(kv_cache_tokens=128, preemption_mode="swap", swap_space=2**-12, speculative_config=SPECULATION["draft"])) == expected, "guessed"
    alone = [generate(make(), [prompt], [key])[0] for key, prompt in enumerate(PROMPTS)]
    assert alone == expected
    assert (generate(make_llm(kernels=kernels)) == expected) == (kv_cache_dtype == "auto")


def test_an_unknown_kv_cache_dtype_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="kv_cache_dtype' is 'int3'; it must be one of auto, bfloat16, int8, fp8_e4m3, int4"):
        make_llm(kv_cache_dtype="int3")


MEMORY: dict[str, dict[str, Any]] = {
    "roomy": {},
    "recompute": {"kv_cache_tokens": 128, "preemption_mode": "recompute"},
    "swap": {"kv_cache_tokens": 128, "preemption_mode": "swap", "swap_space": 2**-12},
}
SPECULATION: dict[str, dict[str, Any] | None] = {
    "alone": None, "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5}, "draft": {"method": "draft", "model": 0},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
}


@pytest.mark.full
@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("chunk", [16, 23, 64])
def test_every_combination_draws_the_same_bits(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], kernels: str, chunk: int, memory: str, speculation: str
) -> None:
    """Cold, warm, and after a weight update during running requests, in one engine."""
    llm = make_llm(kernels=kernels, max_num_batched_tokens=chunk, **MEMORY[memory], speculative_config=SPECULATION[speculation])
    expected = generate(make_llm(kernels=kernels))
    assert generate(llm) == expected
    assert generate(llm, keys=list(range(len(PROMPTS)))) == expected
    assert llm.engine.tokenizer is not None
    for key, prompt in enumerate(PROMPTS):
        llm.engine.add_request(prompt, llm.engine.tokenizer.encode(prompt), PARAMS[prompt], key=key)
    for _ in range(15):
        llm.engine.step()
    new = dict(read_tensors(make_folder("qwen3", 1)))
    llm.update_weights(new, WeightVersion(0, 1), new if speculation == "draft" else None)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        llm.engine.check_integrity()
    updated = generate(llm, keys=list(range(len(PROMPTS))))
    fresh = make_llm(weights=1, kernels=kernels, weight_version=WeightVersion(0, 1))
    assert updated == generate(fresh)


def test_a_small_cache_really_preempts(make_llm: Callable[..., LLM]) -> None:
    for settings, how in (({}, "recompute"), ({"swap_space": 2**-12, "preemption_mode": "swap"}, "swap_out")):
        llm = make_llm(kv_cache_tokens=128, **settings)
        generate(llm)
        found = llm.engine.transitions()
        assert found[Transition(how)] > 3 and found[Transition.SWAP_IN] == found[Transition.SWAP_OUT]


def test_a_warm_cache_changes_no_bit(make_llm: Callable[..., LLM], kernels: str, expected: list[list[CompletionOutput]]) -> None:
    llm = make_llm(kernels=kernels)
    assert generate(llm) == expected
    answers = llm.generate(PROMPTS, list(PARAMS.values()))
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 32, 16, 32]
    assert completions(answers) == expected


def test_a_request_alone_equals_the_same_request_in_a_batch(
    make_llm: Callable[..., LLM], kernels: str, expected: list[list[CompletionOutput]]
) -> None:
    llm = make_llm(kernels=kernels)
    alone = [generate(llm, [prompt], [key])[0] for key, prompt in enumerate(PROMPTS)]
    assert alone == expected
    backwards = generate(llm, PROMPTS[::-1], list(range(len(PROMPTS)))[::-1])
    assert backwards[::-1] == expected


@pytest.mark.parametrize("caching", [True, False])
def test_a_group_equals_as_many_single_requests_with_its_keys(
    make_llm: Callable[..., LLM], kernels: str, expected: list[list[CompletionOutput]], caching: bool
) -> None:
    engine = make_llm(kernels=kernels, enable_prefix_caching=caching).engine
    assert engine.tokenizer is not None
    for key, prompt in enumerate(PROMPTS):
        for index in range(3):
            own = replace(PARAMS[prompt], n=1)
            engine.add_request(f"{key}/{index}", engine.tokenizer.encode(prompt), own, key=key, first_index=index)
    answers: dict[str, CompletionOutput] = {}
    while engine.has_unfinished_requests:
        answers.update((output.request_id, output.outputs[0]) for output in engine.step())
    for key, group in enumerate(expected):
        for index, completion in enumerate(group):
            assert replace(answers[f"{key}/{index}"], index=index) == completion


def test_a_group_larger_than_the_engine_goes_in_parts(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(n=10, max_tokens=8, seed=1)
    wide, narrow = make_llm(), make_llm(max_num_seqs=3)
    expected = completions(wide.generate(PROMPTS[:2], params))
    assert completions(narrow.generate(PROMPTS[:2], params)) == expected
    assert len({tuple(c.token_ids) for c in expected[0]}) > 5


def test_without_a_seed_a_second_call_draws_anew_and_a_second_engine_the_same(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=20)
    one, other = make_llm(seed=4), make_llm(seed=4)
    first, second = completions(one.generate(PROMPTS, params)), completions(one.generate(PROMPTS, params))
    assert first != second
    assert [completions(other.generate(PROMPTS, params)) for _ in range(2)] == [first, second]
    assert completions(make_llm(seed=5).generate(PROMPTS, params)) != first


def test_wrong_content_in_a_cached_block_is_seen(
    make_llm: Callable[..., LLM], expected: list[list[CompletionOutput]]
) -> None:
    """The comparison of warm and cold cache can fail: blocks with other content make it fail."""
    llm = make_llm()
    generate(llm)
    for layer in llm.engine._runner.caches:
        layer.keys.add_(0.01)
    assert generate(llm) != expected
