"""Speculation changes the number of steps of a completion and nothing else."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.engine.spec_decode.draft_length import DraftLength
from tandem.engine.spec_decode.ngram_proposer import NgramIndex
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import UserError, WeightVersion

PROMPTS = ["sort 4 1 9 2", "the quick brown fox jumps over the lazy dog"]
PARAMS = SamplingParams(n=2, max_tokens=50, seed=3, temperature=0.8, ignore_eos=True)


@pytest.fixture
def draft() -> Callable[..., dict[str, Any]]:
    """Returns settings with a draft model of the given weights; the target's own weights propose every token correctly."""
    return lambda weights=0, **more: {"method": "draft", "model": weights, **more}


def outputs(llm: LLM, params: SamplingParams = PARAMS, **options: Any) -> list[list[CompletionOutput]]:
    answers = llm.generate(PROMPTS, params, request_keys=[0, 1], **options)
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


def test_a_draft_model_that_is_the_model_guesses_every_token_right(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    llm = make_llm(speculative_config=draft(num_speculative_tokens=4))
    assert outputs(llm) == outputs(make_llm())
    figures = llm.engine.cumulative_stats()
    assert figures.speculation.accepted == figures.speculation.proposed > 0
    # 4 sequences of 50 tokens: one token with the prefill, then 5 per step and the rest of 49.
    assert figures.steps == 1 + 10 and figures.drawn_tokens == 200
    assert figures.speculation.proposals == 4 * 10 and figures.speculation.proposed == 4 * (9 * 4 + 3)


def test_a_draft_model_of_other_weights_is_mostly_wrong_and_changes_nothing(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    llm = make_llm(speculative_config=draft(1))
    assert outputs(llm) == outputs(make_llm())
    found = llm.engine.cumulative_stats().speculation
    assert 0 < found.accepted < found.proposed


@pytest.mark.parametrize(
    "cut",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 23},
        {"min_tokens": 17, "ignore_eos": False, "logit_bias": {2: 6.0}},
        {"stop": ["a", "q3"]},
        {"stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 9},
        {"stop_token_ids": [7, 11, 20]},
        {"logprobs": 3, "prompt_logprobs": 1},
        {"max_tokens": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_what_ends_a_completion_cuts_accepted_tokens_exactly(
    make_llm: Callable[..., LLM], draft: Callable[..., Any], method: str, cut: dict[str, Any]
) -> None:
    params = replace(PARAMS, **cut)
    speculative = draft(num_speculative_tokens=6) if method == "draft" else {"method": "ngram", "prompt_lookup_min": 1}
    llm = make_llm(speculative_config=speculative)
    assert outputs(llm, params) == outputs(make_llm(), params)
    assert llm.engine.cumulative_stats().speculation.accepted > 0 or params.max_tokens in (1, 2) or method == "ngram"


def test_a_stream_gets_several_tokens_a_step(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    engine = make_llm(speculative_config=draft()).engine
    assert engine.tokenizer is not None
    params = replace(PARAMS, n=1, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", engine.tokenizer.encode(PROMPTS[0]), params, key=0)
    parts = []
    while engine.has_unfinished_requests:
        parts += [output.outputs[0] for output in engine.step()]
    assert [len(part.token_ids) for part in parts] == [1] + [5] * 9 + [4]
    whole = make_llm().generate(PROMPTS[:1], replace(PARAMS, n=1), request_keys=[0])[0].outputs[0]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert "".join(part.text for part in parts) == whole.text


def test_a_request_can_do_without(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    llm = make_llm(speculative_config=draft())
    assert outputs(llm, num_draft_tokens=0) == outputs(make_llm())
    assert llm.engine.cumulative_stats().speculation.proposals == 0
    assert outputs(llm, num_draft_tokens=1) == outputs(make_llm())
    found = llm.engine.cumulative_stats().speculation
    assert found.proposed == found.proposals > 0


@pytest.mark.parametrize("keeps_draft", [False, True])
def test_draft_weights_change_in_the_same_update(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], draft: Callable[..., Any], keeps_draft: bool
) -> None:
    llm = make_llm(speculative_config=draft())
    outputs(llm)
    new = dict(read_tensors(make_folder("qwen3", 1)))
    llm.update_weights(new, WeightVersion(0, 1), draft_tensors=None if keeps_draft else new)
    before = llm.engine.cumulative_stats().speculation
    found, expected = outputs(llm), outputs(make_llm(weights=1))
    for group, other in zip(found, expected, strict=True):
        assert [(c.token_ids, c.raw_logprobs) for c in group] == [(c.token_ids, c.raw_logprobs) for c in other]
    after = llm.engine.cumulative_stats().speculation
    accepted, proposed = after.accepted - before.accepted, after.proposed - before.proposed
    assert (accepted == proposed) == (not keeps_draft)


@pytest.mark.parametrize("wrong", ["target", "draft"])
def test_an_update_that_does_not_fit_changes_neither_model(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], draft: Callable[..., Any], wrong: str
) -> None:
    llm = make_llm(speculative_config=draft())
    expected = outputs(llm)
    good = dict(read_tensors(make_folder("qwen3", 1)))
    bad = {**good, "model.norm.weight": torch.ones(5)}
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        llm.update_weights(bad if wrong == "target" else good, WeightVersion(0, 1), bad if wrong == "draft" else good)
    assert llm.weight_version == (0, 0) and outputs(llm) == expected
    found = llm.engine.cumulative_stats().speculation
    assert found.accepted == found.proposed


@pytest.mark.parametrize("failing", [2, 3, 5, 9, 13])
def test_a_step_that_fails_between_accepted_tokens_loses_and_repeats_none(
    make_llm: Callable[..., LLM], draft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    params = replace(PARAMS, stop=["a"], stop_token_ids=[9, 13], logprobs=1)
    expected = outputs(make_llm(), params)
    engine = make_llm(speculative_config=draft()).engine
    assert engine.tokenizer is not None
    for key, prompt in enumerate(PROMPTS):
        engine.add_request(str(key), engine.tokenizer.encode(prompt, add_special_tokens=True), params, key=key)
    real, calls = engine._runner._sample, iter(range(1, 10_000))

    def draw(*given: Any) -> Any:
        if next(calls) == failing:
            raise RuntimeError("no memory")
        return real(*given)

    monkeypatch.setattr(engine._runner, "_sample", draw)
    found, failed = {}, 0
    while engine.has_unfinished_requests:
        try:
            found.update((output.request_id, output.outputs) for output in engine.step())
        except RuntimeError:
            failed += 1
        engine.check_integrity()
    assert failed == 1 and [found["0"], found["1"]] == expected


def test_guesses_take_no_block_that_somebody_needs(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    plain, guessing = make_llm(kv_cache_tokens=192), make_llm(kv_cache_tokens=192, speculative_config=draft(num_speculative_tokens=8))
    assert outputs(guessing) == outputs(plain)
    assert guessing.engine.cumulative_stats().speculation.accepted > 0


def test_prompt_lookup_proposes_what_followed_the_longest_run_last() -> None:
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        low, high, count = 2, 4, 3
        index = NgramIndex(low, high)
        index.extend(tokens[:5])
        index.extend(tokens[5:])
        expected: list[int] = []
        for size in range(high, low - 1, -1):
            places = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[len(tokens) - size :]]
            if places and not expected:
                follow = list(tokens)
                for _ in range(count):
                    follow.append(follow[places[-1] + size + len(follow) - len(tokens)])
                expected = follow[len(tokens) :]
        assert index.propose(count) == expected


def test_the_draft_length_follows_what_comes_true() -> None:
    length = DraftLength(4, worth=0.4)
    assert length.next() == 4
    length.learn(4, 1)
    assert length.next() == 2
    length.learn(2, 2)
    assert length.next() == 3
    length.learn(3, 0)
    assert length.next() == 1
    # The acceptance rate is now 0.8, and falls to 0.8 of itself with each rejection: after four it is 0.33.
    for _ in range(3):
        length.learn(1, 0)
        assert length.next() == 1
    for rest in (2, 4, 8, 16, 32, 64, 64):
        length.learn(1, 0)
        assert [length.next() for _ in range(rest + 1)] == [0] * rest + [1]
    while length.hits < 0.4:
        length.learn(1, 1)
    length.rest = 0
    assert length.next() > 1 and length.rests == 0
    fixed = DraftLength(4, worth=0.4, is_adaptive=False)
    for _ in range(20):
        fixed.learn(4, 0)
    assert fixed.next() == 4


def test_a_full_batch_does_not_guess(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    llm = make_llm(speculative_config=draft(disable_by_batch_size=3))
    assert outputs(llm) == outputs(make_llm())
    assert llm.engine.cumulative_stats().speculation.proposals == 0
    outputs(llm, replace(PARAMS, n=1))
    assert llm.engine.cumulative_stats().speculation.proposals > 0


def test_the_measured_time_of_steps_decides_by_default_whether_an_engine_guesses(make_llm: Callable[..., LLM], draft: Callable[..., Any]) -> None:
    llm = make_llm(speculative_config=draft(disable_by_batch_size=None))
    assert outputs(llm) == outputs(make_llm())
    switch, before = llm.engine._scheduler.draft_switch, llm.engine.cumulative_stats().speculation.proposals
    assert switch is not None and not switch.pays(64), "64 sequences were never measured"
    switch.pays = lambda sequences: False  # type: ignore[method-assign]
    assert outputs(llm) == outputs(make_llm()) and llm.engine.cumulative_stats().speculation.proposals == before
    switch.pays = lambda sequences: True  # type: ignore[method-assign]
    assert outputs(llm) == outputs(make_llm()) and llm.engine.cumulative_stats().speculation.proposals > before
    assert make_llm(speculative_config=draft()).engine._scheduler.draft_switch is None


@pytest.mark.parametrize(
    ("speculative", "says"),
    [
        ({"method": "eagle"}, "method' is 'eagle'"),
        ({}, "method' is missing"),
        ({"method": "draft"}, "no model is given"),
        ({"method": "ngram", "model": "x"}, "'ngram' uses none"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min is 5"),
        ({"method": "ngram", "tokens": 5}, "unknown key 'engine.speculative_config.tokens'"),
        ({"method": "ngram", "adaptive": 1}, "adaptive' is 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make_llm: Callable[..., LLM], speculative: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_llm(speculative_config=speculative)


def test_more_guesses_than_the_engine_makes_are_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="num_draft_tokens is 5"):
        make_llm(speculative_config={"method": "ngram"}).generate(PROMPTS, PARAMS, num_draft_tokens=5)
    with pytest.raises(UserError, match="start it with speculative settings"):
        make_llm().generate(PROMPTS, PARAMS, num_draft_tokens=1)
    with pytest.raises(UserError, match="no draft model"):
        make_llm().update_weights({}, WeightVersion(0, 1), draft_tensors={})
