"""The prefix cache of a model with linear attention: prompts go on from snapshots of its states, with the bits of prompts that are computed from their first
token."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.kv_cache.state_rows import StateRows
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import resolve
from tandem.estimate.model_bytes import kv_bytes_per_token, state_bytes
from tandem.model.huggingface.model_folder import read_shapes, read_tensors
from tandem.types import WeightVersion

SYSTEM = "the quick brown fox jumps over the lazy dog and sleeps"
"""54 tokens, three full blocks."""
PARAMS = SamplingParams(max_tokens=20, seed=3, temperature=0.9, ignore_eos=True)


def answer(llm: LLM, prompt: str | list[int], params: SamplingParams = PARAMS) -> RequestOutput:
    (output,) = llm.generate([prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}], params, request_keys=[0])
    llm.engine.check_integrity()
    return output


def check_bits(llm: LLM, cold: LLM, prompt: str | list[int], num_cached: int) -> RequestOutput:
    output, expected = answer(llm, prompt), answer(cold, prompt)
    assert output.num_cached_tokens == num_cached and expected.num_cached_tokens == 0
    assert output.outputs == expected.outputs
    return output


def test_a_prompt_goes_on_from_the_longest_cached_prefix_that_has_a_state(make_llm: Callable[..., LLM]) -> None:
    llm, cold = make_llm("qwen3_next"), make_llm("qwen3_next", enable_prefix_caching=False)
    first = check_bits(llm, cold, f"{SYSTEM} 1 and 2", 0)
    check_bits(llm, cold, f"{SYSTEM} 1 and 2", 48)
    # Three blocks are cached, and 48 tokens is where the first prompt has its last full block.
    check_bits(llm, cold, f"{SYSTEM} of course", 48)
    # Here prompts part in the second block, where no state is; the first of them that computes it keeps one there.
    check_bits(llm, cold, f"{SYSTEM[:20]} 5 6 7 8 9 5 6 7 8 9 5 6 7", 0)
    check_bits(llm, cold, f"{SYSTEM[:20]} a b c d e f g", 16)
    # A dialogue goes on after the last full block of the answer: of 62 + 19 tokens with keys and values.
    check_bits(llm, cold, [*first.prompt_token_ids, *first.outputs[0].token_ids, 5, 6], 80)


def test_a_row_that_a_step_writes_has_no_other_writer_in_that_step() -> None:
    def prefill(tokens: int) -> Prefill:
        request = Request("r", None, [0] * tokens, PARAMS, 0, 0, 0)
        return Prefill([Sequence(request, 0, 0)], request.prompt_token_ids, block_hashes=[bytes([tokens, i]) for i in range(tokens // 16)])

    states, one, other = StateRows(range(4, 5), 0), prefill(40), prefill(41)
    assert states.keep(one, 0, 16) == () and states.keep(one, 16, 40) == ((15, 4),)
    assert states.num_served(one.block_hashes) == 0 and states.keep(other, 0, 41) == ()
    states.drop(one.block_hashes[1])
    assert states.keep(other, 0, 41) == ()
    states.begin_step()
    assert states.keep(other, 0, 41) == ((31, 4),)
    states.begin_step()
    assert (states.num_served(one.block_hashes), states.num_served(other.block_hashes)) == (0, 2)


def test_snapshots_take_as_much_memory_as_keys_and_values(make_folder: Callable[..., Path]) -> None:
    shapes = read_shapes(make_folder("qwen3_next"))
    block, state = 16 * kv_bytes_per_token(shapes, "float32"), state_bytes(shapes)
    for args, num_blocks, snapshots in (
        (EngineArgs(kv_cache_tokens=640), 40, min(40, 40 * block // state)), (EngineArgs(kv_cache_tokens=640, enable_prefix_caching=False), 40, 0),
        (EngineArgs(kv_cache_tokens=640, cache_implementation="static"), 40, 0),
    ):
        settings = resolve(args, shapes, torch.float32)
        assert (settings.num_blocks, settings.state_snapshots) == (num_blocks, snapshots)
    speculative = SpeculativeConfig("ngram", num_speculative_tokens=3, disable_by_batch_size=2)
    engine = LLM(make_folder("qwen3_next"), kv_cache_tokens=640, max_num_seqs=5, speculative_config=speculative).engine
    assert engine.kv_cache_bytes == 40 * block + (5 + engine.settings.state_snapshots + 5) * state, "draft tokens share as many states as sequences run"
    settings = resolve(EngineArgs(swap_space=2**-12), shapes, torch.float32)
    assert settings.swap_states == 2**17 // state and settings.swap_blocks == (2**18 - settings.swap_states * state) // block


def test_samples_of_a_prompt_compute_it_once(make_llm: Callable[..., LLM]) -> None:
    llm, params = make_llm("qwen3_next"), SamplingParams(n=6, max_tokens=8, seed=3, temperature=0.9, ignore_eos=True)
    engine = llm.engine
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(SYSTEM)
    engine.add_request(SYSTEM, tokens, params, key=0)
    computed = 0
    while engine.has_unfinished_requests:
        engine.step()
        computed += engine.stats().step_tokens
    assert computed == len(tokens) + 6 * 7


@pytest.mark.full
def test_an_update_of_the_weights_drops_all_snapshots(make_llm: Callable[..., LLM], make_folder: Callable[..., Path]) -> None:
    llm, cold = make_llm("qwen3_next"), make_llm("qwen3_next", 1, enable_prefix_caching=False)
    answer(llm, SYSTEM)
    llm.update_weights(dict(read_tensors(make_folder("qwen3_next", 1))), WeightVersion(0, 1))
    cold.update_weights(dict(read_tensors(make_folder("qwen3_next", 1))), WeightVersion(0, 1))
    check_bits(llm, cold, SYSTEM, 0)
    check_bits(llm, cold, SYSTEM, 48)


@pytest.mark.full
@pytest.mark.parametrize("settings", [
    {
        "kv_cache_tokens": 160, "preemption_mode": "swap", "swap_space": 2**-13, "max_num_seqs": 5,
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    },
    {"kv_cache_tokens": 160, "max_num_batched_tokens": 19, "async_scheduling": True},
])  # fmt: skip
def test_random_dialogues_in_little_memory_have_the_bits_of_cold_ones(make_llm: Callable[..., LLM], settings: dict[str, Any]) -> None:
    rng = random.Random(7)
    beginnings = [SYSTEM, SYSTEM[:37] + "0 1 2 3 4 5 6 7 8", "x" * 40]
    prompts = [rng.choice(beginnings)[: rng.randint(14, 54)] + "".join(rng.choices("abc 12", k=rng.randint(1, 20))) for _ in range(24)]
    params = SamplingParams(n=2, max_tokens=24, seed=3, temperature=0.9, ignore_eos=True)
    cold = [each.outputs for each in make_llm("qwen3_next", enable_prefix_caching=False).generate(prompts, params, request_keys=list(range(24)))]
    llm = make_llm("qwen3_next", **settings)
    engine, cached = llm.engine, 0
    assert engine.tokenizer is not None
    for _ in range(2):
        for key, prompt in enumerate(prompts):
            engine.add_request(str(key), engine.tokenizer.encode(prompt), params, key=key)
        while engine.has_unfinished_requests:
            for output in engine.step():
                assert output.outputs == cold[int(output.request_id)]
                cached += output.num_cached_tokens
            engine.check_integrity()
    assert cached > 0
    assert engine.stats().num_preemptions > 0 and (engine.transitions()[Transition.SWAP_IN] > 0) == ("swap_space" in settings)


@pytest.mark.full
@pytest.mark.parametrize("speculation", [{}, {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}}])
def test_prompts_that_share_a_prefix_have_the_greedy_tokens_and_logprobs_of_transformers(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM], speculation: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(make_folder("qwen3_next"), dtype=torch.float32).eval()
    llm, cached = make_llm("qwen3_next", max_num_batched_tokens=40, **speculation), []
    for end in (" 1 and 2", " 1 and 3", "", " of course", " 1 and 2 and 3 and 4 and 5"):
        output = answer(llm, SYSTEM + end, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        cached.append(output.num_cached_tokens)
        prompt, (completion,) = torch.tensor([output.prompt_token_ids]), output.outputs
        with torch.no_grad():
            made = torch.cat((prompt, torch.tensor([completion.token_ids])), dim=1)
            logprobs = peer(made).logits[0, prompt.shape[1] - 1 : -1].double().log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == completion.token_ids
        own = torch.tensor(completion.raw_logprobs, dtype=torch.float64)
        assert (logprobs.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1) - own).abs().max() < 1e-4
    assert cached == [0, 48, 48, 48, 48]
