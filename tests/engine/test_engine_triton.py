"""The engine over the Triton kernels in Triton's interpreter: its tokens, and the bits of the trainer's forward pass."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  (skips without it)

import tandem.kernels.mixed as mixed
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import Kernels, select
from tandem.kernels.mixed import Precision, in_precision
from tandem.model.attention import PackedContext
from tandem.model.huggingface.model_folder import load_model


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def trainer_logprobs(folder: Path, kernels: Kernels, tokens: list[int], prompt: int) -> list[float]:
    """Returns the log-probabilities of every token after the prompt, by one packed forward pass."""
    decoder = load_model(folder, kernels)
    count = len(tokens) - 1
    context = PackedContext(torch.tensor([0, count], dtype=torch.int32), count)
    with torch.no_grad():
        hidden = decoder(torch.tensor(tokens[:-1]), torch.arange(count), context)
        scored = decoder.token_logprobs(hidden, torch.arange(prompt - 1, count), torch.tensor(tokens[prompt:]), 1.0, count)
    return scored.raw.tolist()


OTHERS = ("mixtral", "granite", "olmo2", "smollm3", "gemma2", "qwen2_moe", "glm4_moe", "gpt_oss", "cohere", "deepseek_v2", "deepseek_v3", "qwen3_next")


@pytest.mark.parametrize("architecture", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_engine_and_trainer_agree_bit_for_bit_over_triton_and_draw_what_the_reference_draws(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], architecture: str
) -> None:
    prompts = ["sort 4 1 9 2 8 of", "q"]
    params = [SamplingParams(max_tokens=3, seed=3, temperature=0.8, ignore_eos=True), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)]
    llm = make_llm(architecture, kernels="triton", async_scheduling=True, max_num_seqs=2, max_num_batched_tokens=11)
    engine = llm.engine
    engine._runner.make_graphs(lambda step: step)
    answers = llm.generate(prompts, params, request_keys=[0, 1])
    expected = make_llm(architecture, kernels="reference").generate(prompts, params, request_keys=[0, 1])
    kernels = select("triton")
    for answer, other in zip(answers, expected, strict=True):
        found = answer.outputs[0]
        assert found.token_ids == other.outputs[0].token_ids
        assert found.raw_logprobs == pytest.approx(other.outputs[0].raw_logprobs, abs=1e-4)
        tokens = [*answer.prompt_token_ids, *found.token_ids]
        assert found.raw_logprobs == trainer_logprobs(make_folder(architecture), kernels, tokens, len(answer.prompt_token_ids))
    engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("qwen3", "bf16"), ("qwen3", "fp16"), ("smollm3", "fp16"), *((name, "bf16") for name in OTHERS[1:] if name != "smollm3")],
)
def test_engine_and_trainer_agree_over_triton_in_16_bits(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, architecture: str, precision: Precision
) -> None:
    """As on a GPU with 16-bit units: fp32 weights and residual stream, products and cache in 16 bits."""
    monkeypatch.setattr(mixed, "is_emulated", lambda precision, device: False)
    params = SamplingParams(max_tokens=3, seed=3, temperature=0.8, ignore_eos=True)
    llm = make_llm(architecture, kernels="triton", precision=precision, max_num_batched_tokens=16)
    (answer,) = llm.generate(["sort 4 1 9 2 8 of"], params, request_keys=[0])
    found, kernels = answer.outputs[0], in_precision(select("triton"), precision, torch.device("cpu"))
    tokens = [*answer.prompt_token_ids, *found.token_ids]
    assert found.raw_logprobs == trainer_logprobs(make_folder(architecture), kernels, tokens, len(answer.prompt_token_ids))
