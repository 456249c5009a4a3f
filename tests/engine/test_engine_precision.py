"""An engine under the trainer's 16-bit precision, emulated and on 16-bit units: the bits of the trainer's forward pass."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tandem.kernels.mixed as mixed
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.kernels.mixed import Precision, in_precision
from tandem.model.attention import PackedContext
from tandem.model.huggingface.model_folder import load_model

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog"]
PARAMS = SamplingParams(max_tokens=40, seed=11, temperature=0.9, ignore_eos=True)


def trainer_logprobs(folder: Path, precision: Precision, tokens: list[int], prompt: int) -> list[float]:
    """Of every token after the prompt, by one packed forward pass."""
    decoder = load_model(folder, in_precision(select("reference"), precision, torch.device("cpu")))
    count = len(tokens) - 1
    with torch.no_grad():
        hidden = decoder(torch.tensor(tokens[:-1]), torch.arange(count), PackedContext(torch.tensor([0, count], dtype=torch.int32), count))
        scored = decoder.token_logprobs(hidden, torch.arange(prompt - 1, count), torch.tensor(tokens[prompt:]), 1.0, count)
    return [float(value) for value in scored.raw]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("is_native", [True, False])
def test_an_engine_has_the_bits_of_a_trainer_of_16_bits(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, architecture: str, precision: Precision, is_native: bool
) -> None:
    if is_native:
        # What a GPU with 16-bit units does, with the same tensors in the same dtypes, computed by the kernels of the CPU.
        monkeypatch.setattr(mixed, "is_emulated", lambda precision, device: False)
    folder = make_folder(architecture)
    llm = LLM(folder, kernels="reference", precision=precision, max_num_seqs=2, max_num_batched_tokens=23)
    (cache, *_) = llm.engine._runner.caches
    assert cache.keys.dtype == ({"bf16": torch.bfloat16, "fp16": torch.float16}[precision] if is_native else torch.float32)
    answers = llm.generate(PROMPTS, PARAMS, request_keys=range(len(PROMPTS)))
    exact = LLM(folder, kernels="reference").generate(PROMPTS, PARAMS, request_keys=range(len(PROMPTS)))
    for answer, other in zip(answers, exact, strict=True):
        found, tokens = answer.outputs[0], [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        assert list(found.raw_logprobs) == trainer_logprobs(folder, precision, tokens, len(answer.prompt_token_ids))
        assert list(found.raw_logprobs) != list(other.outputs[0].raw_logprobs)
