"""Log-probabilities of prompts have the trainer's bits, whatever was cached, chunked or preempted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import with_kernels

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.model.huggingface.model_folder import load_model, read_tensors
from tandem.trainer.logprobs import infer
from tandem.trainer.micro_batch import collate
from tandem.types import TrainSequence, UserError, WeightVersion

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog", "x" * 48, "a prompt of 16 ch"]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0)


def scores(answer: RequestOutput) -> list[float]:
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    entries = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in entries if entry is not None]


def trainers(folder: Path, kernels: str, tokens: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
    """Returns the log-probabilities of all tokens except the first, by the trainer's forward pass."""
    sequences = []
    for i, ids in enumerate(tokens):
        zeros = (0.0,) * len(ids)
        sequences.append(
            TrainSequence(
                id=str(i), token_ids=tuple(ids), prompt_length=1, loss_mask=(0.0,) + (1.0,) * (len(ids) - 1), advantages=zeros,
                rollout_logprobs=zeros, sampling_logprobs=zeros,
            )
        )  # fmt: skip
    model = load_model(folder, select(kernels, torch.float32))  # type: ignore[arg-type]
    batches = [collate([s], torch.float32, torch.device("cpu")) for s in sequences if len(s.token_ids) > 1]
    found = iter(infer(model, batches, temperature))
    return [next(found)[1].tolist() if len(ids) > 1 else [] for ids in tokens]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_prompts_logprobs_are_the_trainers_bit_for_bit(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM], kernels: str
) -> None:
    answers = make_llm(kernels=kernels).generate(PROMPTS, SCORE)
    expected = trainers(make_folder(), kernels, [answer.prompt_token_ids for answer in answers])
    assert [scores(answer) for answer in answers] == expected and expected[0] == []
    assert all(answer.outputs[0].token_ids == [] and answer.outputs[0].text == "" for answer in answers)
    assert [answer.outputs[0].finish_reason for answer in answers] == ["length"] * 5


def test_scores_and_top_entries_are_those_of_transformers(make_folder: Callable[..., Path], make_llm: Callable[..., LLM]) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(make_folder(), dtype=torch.float32).eval()
    answer = make_llm().generate(PROMPTS[2], SamplingParams(max_tokens=3, prompt_logprobs=4))[0]
    assert answer.prompt_logprobs is not None and len(answer.outputs[0].token_ids) == 3
    with torch.no_grad():
        expected = peer(torch.tensor([answer.prompt_token_ids])).logits[0].double().log_softmax(-1)
    for i, entry in enumerate(answer.prompt_logprobs[1:], start=1):
        row, token = expected[i - 1], answer.prompt_token_ids[i]
        assert entry is not None and set(entry) == {token, *row.topk(4).indices.tolist()}
        assert entry[token].decoded_token == PROMPTS[2][i]
        for other, found in entry.items():
            assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert found.rank == int((row > row[other]).sum()) + 1


SETTINGS = {
    "chunks": {"max_num_batched_tokens": 16}, "two rows": {"max_num_seqs": 2, "max_num_batched_tokens": 5}, "preemption": {"kv_cache_tokens": 128},
}


@with_kernels(SETTINGS, quick=["chunks"])
def test_neither_chunks_nor_preemption_nor_a_warm_cache_change_a_bit(
    make_llm: Callable[..., LLM], settings: dict[str, Any], kernels: str
) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=40, prompt_logprobs=2, ignore_eos=True)
    cold = make_llm(kernels=kernels).generate(PROMPTS, params)
    llm = make_llm(kernels=kernels, **settings)
    for _ in range(2):
        found = llm.generate(PROMPTS, params)
        assert [a.prompt_logprobs for a in found] == [a.prompt_logprobs for a in cold]
        assert [a.outputs for a in found] == [a.outputs for a in cold]
        assert all(a.num_cached_tokens == 0 for a in found)
        llm.engine.check_integrity()
    plain = llm.generate(PROMPTS, SamplingParams(n=2, seed=1, max_tokens=40, ignore_eos=True))
    assert [a.outputs for a in plain] == [a.outputs for a in cold]
    assert not llm.engine._runner.prompt_logprobs


def test_a_score_is_the_logprob_that_the_sampler_reported(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    drawn = llm.generate(PROMPTS, SamplingParams(seed=5, max_tokens=40, temperature=1.3, repetition_penalty=1.2))
    texts = [{"prompt_token_ids": a.prompt_token_ids + a.outputs[0].token_ids} for a in drawn]
    for answer, again in zip(drawn, llm.generate(texts, SCORE), strict=True):
        assert scores(again)[len(answer.prompt_token_ids) - 1 :] == answer.outputs[0].raw_logprobs


def test_a_rollout_knows_the_policy_only_at_temperature_1_or_with_nothing_filtered(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """Why a recipe with a filter and another temperature must recompute pi_old: the sampling distribution is not the policy."""
    llm = make_llm()
    for temperature, top_p in ((1.0, 0.8), (0.7, 1.0), (0.7, 0.8)):
        drawn = llm.generate(PROMPTS, SamplingParams(seed=5, max_tokens=40, temperature=temperature, top_p=top_p))
        policy = trainers(make_folder(), "auto", [a.prompt_token_ids + a.outputs[0].token_ids for a in drawn], temperature)
        gaps = []
        for answer, own in zip(drawn, policy, strict=True):
            completion = answer.outputs[0]
            reported = completion.raw_logprobs if temperature == 1 else completion.sampling_logprobs
            gaps += [r - p for r, p in zip(reported, own[len(answer.prompt_token_ids) - 1 :], strict=True)]
        if (temperature, top_p) == (0.7, 0.8):
            assert min(gaps) > -1e-5 and max(gaps) > 0.1
        else:
            assert max(map(abs, gaps)) < 1e-5


def test_a_prompt_that_fills_the_context_can_be_scored(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(kv_cache_tokens=128)
    tokens = [3 + i % 30 for i in range(128)]
    (answer,) = llm.generate({"prompt_token_ids": tokens}, SCORE)
    assert len(scores(answer)) == 127
    llm.engine.check_integrity()
    with pytest.raises(UserError, match="the prompt has 129 tokens"):
        llm.generate({"prompt_token_ids": [*tokens, 3]}, SCORE)
    with pytest.raises(UserError, match="the prompt has 128 tokens"):
        llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, prompt_logprobs=0))


def test_logprobs_of_minus_one_are_a_whole_distribution(make_llm: Callable[..., LLM]) -> None:
    answer = make_llm().generate("sort 4", SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1, ignore_eos=True))[0]
    assert answer.prompt_logprobs is not None and answer.outputs[0].logprobs is not None
    for entry in [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]:
        assert entry is not None and len(entry) == 40
        assert sum(torch.tensor([value.logprob for value in entry.values()]).double().exp()) == pytest.approx(1, abs=1e-5)


def test_a_truncated_prompt_is_its_own_end(make_llm: Callable[..., LLM]) -> None:
    llm, text = make_llm(), "the quick brown fox jumps over the lazy dog"
    expected = llm.generate(text[-10:], SamplingParams(seed=1))[0]
    found = llm.generate(text, SamplingParams(seed=1, truncate_prompt_tokens=10))[0]
    assert (found.prompt_token_ids, found.outputs) == (expected.prompt_token_ids, expected.outputs)
    (long,) = llm.generate("x" * 500, SamplingParams(max_tokens=20, truncate_prompt_tokens=-1, ignore_eos=True))
    assert len(long.prompt_token_ids) == 108 and len(long.outputs[0].token_ids) == 20
    (short,) = llm.generate("abc", SamplingParams(seed=1, truncate_prompt_tokens=10))
    assert len(short.prompt_token_ids) == 3


def test_scores_are_of_one_version_where_weights_change_while_a_prompt_is_read(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    tokens = [3 + i * 7 % 37 for i in range(100)]
    expected = scores(make_llm(weights=1).generate({"prompt_token_ids": tokens}, SCORE)[0])
    engine = make_llm(max_num_batched_tokens=16).engine
    engine.add_request("one", tokens, SCORE)
    for _ in range(3):
        assert engine.step() == []
    engine.update_weights(read_tensors(make_folder("qwen3", 1)), WeightVersion(0, 1))
    answers: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        answers += engine.step()
    assert scores(answers[0]) == expected


def test_an_abort_leaves_no_scores_behind(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm(max_num_batched_tokens=16).engine
    engine.add_request("one", list(range(3, 40)), SCORE)
    engine.step()
    assert engine.abort("one") and not engine._runner.prompt_logprobs
    (answer,) = engine.step()
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[1] is not None and answer.prompt_logprobs[30] is None
    engine.check_integrity()
