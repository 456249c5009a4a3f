"""Drafts from the other completions of a prompt change the number of steps and nothing else."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, Continuation
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.spec_decode.step_costs import StepCosts
from tandem.engine.spec_decode.suffix_automaton import ROOT, SuffixAutomaton
from tandem.engine.spec_decode.suffix_proposer import MatchAcceptance, PathChance
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import UserError, WeightVersion

PROMPTS = ["sort 4 1 9 2", "the quick brown fox jumps over the lazy dog"]
PARAMS = SamplingParams(n=4, max_tokens=50, seed=3, temperature=0.15, ignore_eos=True)
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 8}


def outputs(llm: LLM, params: SamplingParams = PARAMS, **options: Any) -> list[list[CompletionOutput]]:
    answers = llm.generate(PROMPTS, params, request_keys=[0, 1], **options)
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


# -- the index -----------------------------------------------------------------------------------------------------


def occurrences(prompt: list[int], texts: list[list[int]], pattern: list[int]) -> Counter[int]:
    """Returns how often each token follows ``pattern`` in the prompt, which counts once, and in what each of ``texts`` has after it."""
    size = len(pattern)
    ends = [(prompt, end) for end in range(size, len(prompt))] + [(text, end) for text in texts for end in range(max(size, len(prompt)), len(text))]
    return Counter(text[end] for text, end in ends if text[end - size : end] == pattern)


def test_a_match_is_the_longest_end_that_a_token_follows_elsewhere_and_the_draft_its_most_frequent_tokens() -> None:
    rng = random.Random(0)
    for _ in range(150):
        automaton, prompt = SuffixAutomaton(), [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        begin = automaton.extend(ROOT, prompt)
        texts, states = [list(prompt) for _ in range(3)], [begin] * 3
        for _ in range(rng.randrange(1, 40)):
            which, tokens = rng.randrange(3), [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            texts[which] += tokens
            states[which] = automaton.extend(states[which], tokens)
        assert len(automaton) <= 2 * sum(map(len, texts)) + 1
        for text, state in zip(texts, states, strict=True):
            match = next((text[at:] for at in range(len(text)) if occurrences(prompt, texts, text[at:])), [])
            draft = automaton.propose(state, 1, 1.0, 0.0)
            if not match:
                assert draft == []
                continue
            follow = occurrences(prompt, texts, match)
            assert follow[draft[0]] == max(follow.values())
            share = follow[draft[0]] / follow.total()
            assert automaton.propose(state, 1, 1.0, share) == draft and automaton.propose(state, 1, 1.0, share + 1e-9) == []
            longer = automaton.propose(state, 100, 2.0, 0.0)
            assert len(longer) <= 2 * len(match) and automaton.propose(state, 100, 1.0, 0.0) == longer[: len(match)]


def test_a_draft_goes_on_beyond_the_end_of_a_text_that_repeats_itself() -> None:
    automaton = SuffixAutomaton()
    state = automaton.extend(ROOT, [1, 2, 3] * 3)
    assert automaton.propose(state, 12, 4.0, 0.0) == [1, 2, 3] * 4


def test_a_text_that_another_has_begun_is_drafted_from_it() -> None:
    automaton, rng = SuffixAutomaton(), random.Random(1)
    begin = automaton.extend(ROOT, [100, 101])
    answer = [rng.randrange(90) for _ in range(40)]
    automaton.extend(begin, answer)
    state = automaton.extend(begin, answer[:10])
    assert automaton.propose(state, 8, 1.0, 0.1) == answer[10:18]
    # A token that the other does not have leaves a match of the tokens after it alone.
    state = automaton.extend(state, [99, *answer[20:22]])
    assert automaton.propose(state, 8, 1.0, 0.1) == answer[22:24]


# -- what a draft token costs --------------------------------------------------------------------------------------


def test_a_draft_token_pays_where_its_share_of_the_tokens_is_above_its_share_of_the_time() -> None:
    costs = StepCosts(4)
    assert costs.worth(4) == 0.0 and costs.worth(5) == 1.0, "before anything is measured, a limit decides"
    for _ in range(20):
        for tokens in (4, 8, 64, 128):
            costs.observe(tokens, 1e-3 + 1e-5 * tokens)
    # A token costs 10 us: 4 / (1 ms + 40 us) of it are gained at worst in a step of 4 sequences, and 64 / (1 ms + 640 us) in one of 64.
    assert costs.worth(4) == pytest.approx(4 * 1e-5 / 1.04e-3, rel=1e-6) and costs.worth(64) == pytest.approx(64 * 1e-5 / 1.64e-3, rel=1e-6)
    assert costs.pays(4) and not costs.pays(64)
    costs.best_acceptance = 0.01
    assert not costs.pays(4)
    # Where nothing larger is known, the nearest smaller size says what a token costs.
    assert costs.worth(128) == pytest.approx(128 * 1e-5 / 2.28e-3, rel=1e-6)
    # What was not measured for long is unknown again.
    for _ in range(300):
        costs.observe(4, 1e-3)
    assert costs.worth(4) == 0.0 and costs.worth(64) == 1.0


def test_the_acceptance_of_a_match_is_learned_from_what_was_drawn_and_cuts_a_draft() -> None:
    acceptance = MatchAcceptance()
    for _ in range(400):
        # After 1 matching token the first is accepted and the second, after 2, never is; what follows says nothing.
        acceptance.learn(1, [5, 6, 7], [5, 9, 7])
    assert acceptance.rate(1) > 0.99 and acceptance.rate(2) < 0.01 and acceptance.rate(4) == acceptance.rate(1000) == 0.5
    assert acceptance.best == acceptance.rate(1)
    automaton = SuffixAutomaton()
    state = automaton.extend(automaton.extend(ROOT, [1, 2, 3, 4, 5, 6]), [1])
    assert automaton.propose(state, 4, 4.0, 0.0, PathChance(acceptance, 0.9)) == [2]
    assert automaton.propose(state, 4, 4.0, 0.0, PathChance(acceptance, 0.0)) == [2, 3, 4, 5]


# -- the engine ----------------------------------------------------------------------------------------------------


def test_samples_of_a_group_draft_each_other_and_keep_their_bits(make_llm: Callable[..., LLM]) -> None:
    llm, plain = make_llm(speculative_config=SUFFIX), make_llm()
    # The weights are sharp enough at this temperature that the answers of a prompt have much in common.
    assert outputs(llm) == outputs(plain)
    drafted, undrafted = llm.engine.cumulative_stats(), plain.engine.cumulative_stats()
    assert drafted.speculation.proposed > drafted.speculation.accepted > 0
    assert drafted.steps < undrafted.steps and drafted.drawn_tokens == undrafted.drawn_tokens


def test_the_answers_of_others_are_what_is_accepted(make_llm: Callable[..., LLM]) -> None:
    """Greedy, the last of several requests for one prompt is drafted whole from the first, and a request for another prompt is not."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    llm = make_llm(speculative_config={**SUFFIX, "adaptive": False, "suffix_decoding_max_spec_factor": 8.0})
    expected = [make_llm().generate([prompt], params)[0].outputs for prompt in PROMPTS]

    def steps_of(prompt: str) -> tuple[int, list[CompletionOutput]]:
        before = llm.engine.cumulative_stats().steps
        found = llm.generate([prompt], params)[0].outputs
        return llm.engine.cumulative_stats().steps - before, found

    first, found = steps_of(PROMPTS[0])
    again, repeated = steps_of(PROMPTS[0])
    other, differs = steps_of(PROMPTS[1])
    assert found == repeated == expected[0] and differs == expected[1]
    # One token with the prefill, then at most 9 a step of 39.
    assert again <= 1 + 6 < min(first, other)


def test_completions_are_forgotten_beyond_the_number_of_cached_requests(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    llm = make_llm(speculative_config={**SUFFIX, "suffix_decoding_max_cached_requests": 1})
    proposer: Any = llm.engine._runner.proposer
    for prompt in (*PROMPTS, PROMPTS[1]):
        llm.generate([prompt], params)
        assert proposer.completions <= 1 and len(proposer.indices) <= 1


def test_a_salt_or_an_adapter_of_its_own_shares_no_answers(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm(speculative_config=SUFFIX).engine
    assert engine.tokenizer is not None
    for number, salt in enumerate(("a", "b", "a")):
        engine.add_request(str(number), engine.tokenizer.encode(PROMPTS[0]), replace(PARAMS, n=1), key=number, cache_salt=salt)
    while engine.has_unfinished_requests:
        engine.step()
    proposer: Any = engine._runner.proposer
    assert sorted(index.completions for index in proposer.indices.values()) == [1, 2]


@pytest.mark.parametrize(
    "cut",
    [
        {"max_tokens": 1}, {"max_tokens": 2}, {"min_tokens": 17, "ignore_eos": False, "logit_bias": {2: 6.0}}, {"stop": ["a", "q3"]},
        {"stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 9}, {"stop_token_ids": [7, 11, 20]}, {"logprobs": 3, "prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f ]{20}([0-9]{2}x?)*")}, {"repetition_penalty": 1.2, "min_p": 0.05},
        {"n": 1, "temperature": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_ends_or_changes_a_completion_acts_as_without_drafts(make_llm: Callable[..., LLM], cut: dict[str, Any]) -> None:
    params = replace(PARAMS, **cut)
    llm = make_llm(speculative_config=SUFFIX)
    assert outputs(llm, params) == outputs(make_llm(), params)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_tokens": 192}, {"kv_cache_tokens": 192, "swap_space": 2**-12, "preemption_mode": "swap"}, {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False, "cache_implementation": "static", "kv_cache_tokens": 512},
        {"max_num_seqs": 4, "batching": "static", "max_num_batched_tokens": 128},
    ],
    ids=str,
)  # fmt: skip
def test_preemption_swap_chunks_and_caches_change_no_bit(make_llm: Callable[..., LLM], settings: dict[str, Any]) -> None:
    llm = make_llm(speculative_config=SUFFIX, **settings)
    assert outputs(llm) == outputs(make_llm())
    assert llm.engine.cumulative_stats().speculation.accepted > 0


def test_a_window_and_quantized_weights_change_no_bit(make_llm: Callable[..., LLM]) -> None:
    for architecture, options in (("mistral", {}), ("qwen3", {"quantization": "int8", "kv_cache_dtype": "int8"})):
        llm = make_llm(architecture, speculative_config=SUFFIX, **options)
        assert outputs(llm) == outputs(make_llm(architecture, **options))
        assert llm.engine.cumulative_stats().speculation.accepted > 0


def test_measured_costs_decide_how_much_is_drafted_and_change_no_bit(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(speculative_config={**SUFFIX, "disable_by_batch_size": None})
    assert outputs(llm) == outputs(make_llm())
    costs = llm.engine._scheduler.step_costs
    assert costs is not None and 0 <= costs.worth(8) <= 1
    # Where a token costs as much as a step, none is drafted.
    before = llm.engine.cumulative_stats().speculation.proposed
    costs.worth = lambda sequences: 1.0  # type: ignore[method-assign]
    assert outputs(llm) == outputs(make_llm()) and llm.engine.cumulative_stats().speculation.proposed == before


def test_tensor_parallel_ranks_verify_drafts(make_folder: Callable[..., Path], make_llm: Callable[..., LLM], ranks: Callable[..., LLM]) -> None:
    llm = ranks(make_folder(), speculative_config={**SUFFIX, "disable_by_batch_size": 64})
    assert outputs(llm) == outputs(make_llm())
    assert llm.engine.cumulative_stats().speculation.accepted > 0


def test_continued_completions_and_their_siblings_draft_each_other(make_llm: Callable[..., LLM]) -> None:
    """As in partial rollouts: each sample is a request of its own, which begins with the tokens of an earlier round."""
    params = replace(PARAMS, n=1)
    whole, engine = make_llm().generate(PROMPTS[:1], PARAMS, request_keys=[5])[0].outputs, make_llm(speculative_config=SUFFIX).engine
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(PROMPTS[0])
    for index, known in enumerate(whole):
        continues = Continuation(known.token_ids[:20], known.raw_logprobs[:20], known.sampling_logprobs[:20], known.weight_versions[:20])
        engine.add_request(str(index), tokens, params, key=5, first_index=index, continues=continues)
    found: dict[str, CompletionOutput] = {}
    while engine.has_unfinished_requests:
        found |= {output.request_id: output.outputs[0] for output in engine.step()}
        engine.check_integrity()
    assert [(found[str(i)].token_ids, found[str(i)].raw_logprobs) for i in range(4)] == [(known.token_ids, known.raw_logprobs) for known in whole]
    assert engine.cumulative_stats().speculation.accepted > 0


def test_new_weights_keep_the_drafts_and_draw_their_own_tokens(make_llm: Callable[..., LLM], make_folder: Callable[..., Path]) -> None:
    llm = make_llm(speculative_config=SUFFIX)
    outputs(llm)
    llm.update_weights(dict(read_tensors(make_folder("qwen3", 1))), WeightVersion(0, 1))
    found, expected = outputs(llm), outputs(make_llm(weights=1))
    assert [[(c.token_ids, c.raw_logprobs) for c in group] for group in found] == [[(c.token_ids, c.raw_logprobs) for c in group] for group in expected]


def test_a_step_that_fails_loses_and_repeats_no_token(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(PARAMS, stop=["a"], stop_token_ids=[9, 13])
    expected = outputs(make_llm(), params)
    engine = make_llm(speculative_config=SUFFIX).engine
    assert engine.tokenizer is not None
    for key, prompt in enumerate(PROMPTS):
        engine.add_request(str(key), engine.tokenizer.encode(prompt, add_special_tokens=True), params, key=key)
    real, calls = engine._runner.batch.record_spans, iter(range(10_000))

    def record(*given: Any) -> None:
        if next(calls) in (1, 4):
            raise RuntimeError("no memory")
        real(*given)

    monkeypatch.setattr(engine._runner.batch, "record_spans", record)
    found, failed = {}, 0
    while engine.has_unfinished_requests:
        try:
            found.update((output.request_id, output.outputs) for output in engine.step())
        except RuntimeError:
            failed += 1
        engine.check_integrity()
    assert failed == 2 and [found["0"], found["1"]] == expected


@pytest.mark.parametrize(
    ("speculative", "says"),
    [
        ({"method": "suffix", "model": "x"}, "'suffix' uses none"),
        ({"method": "suffix", "prompt_lookup_max": 5}, "prompt_lookup_max' is 5, which is not read: method is 'suffix'"),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.5}, "suffix_decoding_min_token_prob' is 0.5, which is not read: method is 'ngram'"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob is 1.5; it must be from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0.0}, "suffix_decoding_max_spec_factor is 0.0; it must be above 0"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests is -1"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "suffix_decoding_max_tree_depth' cannot be set: matches have no maximum length"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make_llm: Callable[..., LLM], speculative: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_llm(speculative_config=speculative)
