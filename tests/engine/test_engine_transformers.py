"""The engine against transformers with the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

PROMPTS = ["a", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog", "zzzz 000 zzzz 000 z"]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM], architecture: str
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(make_folder(architecture), dtype=torch.float32).eval()
    llm = make_llm(architecture)
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40))
    for answer in answers:
        prompt, (completion,) = torch.tensor([answer.prompt_token_ids]), answer.outputs
        with torch.no_grad():
            made = peer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, pad_token_id=0)
            logprobs = peer(made).logits[0].double().log_softmax(-1)
        expected = made[0, prompt.shape[1] :].tolist()
        assert completion.token_ids == expected
        for i, (token, own) in enumerate(zip(expected, completion.raw_logprobs, strict=True)):
            assert own == pytest.approx(float(logprobs[prompt.shape[1] - 1 + i, token]), abs=1e-4)
        assert set(completion.sampling_logprobs) == {0.0}


def test_float64_agrees_with_float32_and_bfloat16_runs(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    single, double, half = ([a.outputs[0] for a in make_llm(dtype=d).generate(PROMPTS, params)] for d in ("float32", "float64", "bfloat16"))
    for one, two in zip(single, double, strict=True):
        assert one.token_ids == two.token_ids and one.raw_logprobs == pytest.approx(two.raw_logprobs, abs=1e-4)
    assert [len(completion.token_ids) for completion in half] == [20] * 4


def test_sampled_tokens_carry_the_logprobs_that_transformers_computes(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(make_folder("qwen3"), dtype=torch.float32).eval()
    for answer in make_llm().generate(PROMPTS, SamplingParams(n=4, temperature=0.8, max_tokens=30, seed=3)):
        start = len(answer.prompt_token_ids)
        for completion in answer.outputs:
            with torch.no_grad():
                logits = peer(torch.tensor([answer.prompt_token_ids + completion.token_ids])).logits[0, start - 1 : -1].double()
            tokens = torch.tensor(completion.token_ids).unsqueeze(1)
            raw = logits.log_softmax(-1).gather(1, tokens).squeeze(1)
            scaled = (logits / 0.8).log_softmax(-1).gather(1, tokens).squeeze(1)
            assert completion.raw_logprobs == pytest.approx(raw.tolist(), abs=1e-4)
            assert completion.sampling_logprobs == pytest.approx(scaled.tolist(), abs=1e-4)
