"""Changes to logits against transformers' processors and formulas applied token by token."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import with_kernels

from tandem.engine.llm import LLM
from tandem.engine.sample.logits_processors import Position, apply_logits_processors, make_logits_processors
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.structured_output.manager import StructuredOutputManager
from tandem.types import UserError

EOS = 2
PROMPT = "sort 4 1 9 2"


def by_hand(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Processes one row token by token in float64 (OpenAI's formula for the two penalties of generated tokens)."""
    row = [float(value) for value in logits]
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in set(prompt + output):
        row[token] = row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
    for token in set(output):
        row[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    if params.allowed_token_ids is not None:
        row = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(row)]
    if len(output) < params.min_tokens:
        row[EOS] = -math.inf
    return row


def random_case(rng: random.Random, vocab: int) -> tuple[SamplingParams, list[int], list[int]]:
    def some(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.5 else neutral

    params = SamplingParams(
        presence_penalty=some(rng.uniform(-2, 2), 0.0), frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        repetition_penalty=some(rng.uniform(0.5, 2), 1.0), min_tokens=some(5, 0),
        logit_bias=some({rng.randrange(vocab): rng.uniform(-50, 50) for _ in range(3)}, None),
        allowed_token_ids=some([*rng.sample(range(vocab), 20), 0], None),
    )  # fmt: skip
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))]
    return params, prompt, [rng.randrange(vocab) for _ in range(rng.choice((0, 1, 4, 40)))]


@pytest.mark.parametrize("vocab", [31, 64, 1000])
def test_rules_follow_their_formulas_and_a_row_never_sees_the_rows_beside_it(vocab: int) -> None:
    rng, grammars = random.Random(vocab), StructuredOutputManager(None, vocab)
    logits = torch.randn(80, vocab, generator=torch.Generator().manual_seed(1)) * 5
    cases = [random_case(rng, vocab) for _ in range(60)]
    positions = []
    for row, (params, prompt, output) in enumerate(cases):
        rules = make_logits_processors(params, prompt, [EOS], vocab, None, grammars)
        if rules is not None:
            positions.append(Position(row, rules, None, torch.tensor(output, dtype=torch.int64)))
    assert 40 < len(positions) < 60
    before = logits.clone()
    together = apply_logits_processors(logits, positions)
    assert torch.equal(logits, before), "the logits themselves stay as they are"
    untouched = [row for row in range(80) if row not in {position.row for position in positions}]
    assert torch.equal(together[untouched], logits[untouched])
    for position in positions:
        params, prompt, output = cases[position.row]
        assert together[position.row].tolist() == pytest.approx(by_hand(logits[position.row], params, prompt, output), abs=1e-4)
        alone = apply_logits_processors(logits, [position])[position.row]
        assert torch.equal(alone, together[position.row])


def test_greedy_tokens_under_a_repetition_penalty_and_bad_words_equal_those_of_transformers(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    peer = transformers.AutoModelForCausalLM.from_pretrained(make_folder(), dtype=torch.float32).eval()
    llm = make_llm()
    assert llm.engine.tokenizer is not None
    encode = llm.engine.tokenizer.encode
    free = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0].outputs[0].text
    words = [free[3], free[10:12], free[20:23], "never this"]
    prompt = torch.tensor([encode(PROMPT, add_special_tokens=True)])
    for penalty, bad in ((1.0, words), (1.4, []), (0.7, []), (1.2, words)):
        params = SamplingParams(temperature=0, max_tokens=50, repetition_penalty=penalty, bad_words=bad)
        (completion,) = llm.generate(PROMPT, params)[0].outputs
        with torch.no_grad():
            made = peer.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False, pad_token_id=0,
                repetition_penalty=penalty, bad_words_ids=[encode(word) for word in bad] or None,
            )  # fmt: skip
        assert completion.token_ids == made[0, prompt.shape[1] :].tolist()
        assert all(word not in completion.text for word in bad)


def test_greedy_tokens_under_openais_penalties_equal_those_from_transformers_logits(
    make_folder: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(make_folder(), dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=30, frequency_penalty=0.8, presence_penalty=1.1, ignore_eos=True)
    llm = make_llm()
    answer = llm.generate(PROMPT, params)[0]
    prompt, drawn = answer.prompt_token_ids, answer.outputs[0].token_ids
    with torch.no_grad():
        logits = peer(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
    for i, row in enumerate(logits):
        expected = by_hand(row, params, prompt, drawn[:i])
        assert drawn[i] == max(range(len(expected)), key=expected.__getitem__)
        assert answer.outputs[0].raw_logprobs[i] == pytest.approx(float(row.double().log_softmax(-1)[drawn[i]]), abs=1e-4)
    assert drawn != llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0].token_ids


def test_only_allowed_tokens_are_drawn_and_a_ban_never_leaves_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    (answer,) = llm.generate(PROMPT, SamplingParams(n=4, seed=1, max_tokens=30, allowed_token_ids=[7, 5, 9], temperature=3.0))
    assert {token for c in answer.outputs for token in c.token_ids} == {5, 7, 9}
    # min_tokens and bad words would ban the only token: it is drawn.
    (ended,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, min_tokens=4, allowed_token_ids=[EOS]))[0].outputs
    assert (ended.token_ids, ended.finish_reason) == ([EOS], "stop")
    (same,) = llm.generate(PROMPT, SamplingParams(max_tokens=3, bad_words=["c"], allowed_token_ids=[5]))[0].outputs
    assert same.text == "ccc"


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"bad_words": ["e", "th", "1 2"], "min_tokens": 20},
    {"allowed_token_ids": list(range(2, 20)), "logit_bias": {5: 2.0}},
    {},
]


SETTINGS = {"chunks": {"max_num_batched_tokens": 23}, "preemption": {"kv_cache_tokens": 128}, "two rows": {"max_num_seqs": 2}}


@with_kernels(SETTINGS, quick=["preemption"])
def test_rules_draw_the_same_tokens_in_any_batch_chunk_and_after_preemption(
    make_llm: Callable[..., LLM], settings: dict[str, Any], kernels: str
) -> None:
    prompts = ["q", PROMPT, "the quick brown fox jumps over the lazy dog", "x" * 48, "a prompt"]
    params = [SamplingParams(n=2, seed=3, max_tokens=60, logprobs=2, **rules) for rules in RULES]
    expected = [answer.outputs for answer in make_llm(kernels=kernels).generate(prompts, params)]
    assert [answer.outputs for answer in make_llm(kernels=kernels, **settings).generate(prompts, params)] == expected
    llm = make_llm(kernels=kernels)
    alone = [llm.generate(prompt, own, request_keys=[i])[0].outputs for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))]
    assert alone == expected
    plain = llm.generate(prompts, SamplingParams(n=2, seed=3, max_tokens=60, logprobs=2))
    assert plain[-1].outputs == expected[-1] and [a.outputs != e for a, e in zip(plain, expected, strict=True)].count(True) == 4


def test_bad_words_need_a_tokenizer_and_token_ids_a_vocabulary(make_llm: Callable[..., LLM]) -> None:
    blind = make_llm(skip_tokenizer_init=True)
    with pytest.raises(UserError, match="bad_words need a tokenizer"):
        blind.generate({"prompt_token_ids": [3]}, SamplingParams(bad_words=["a"]))
    with pytest.raises(UserError, match="allowed_token_ids names token 40"):
        make_llm().generate("a", SamplingParams(allowed_token_ids=[1, 40]))
