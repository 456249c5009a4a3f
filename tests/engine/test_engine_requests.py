"""The end of a completion, the state after an abort, and requests that are refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.engine.engine import Engine
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.types import RunError, UserError

EOS = 2


def run(engine: Engine) -> dict[str, RequestOutput]:
    answers: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        answers.update((output.request_id, output) for output in engine.step())
    engine.check_integrity()
    return answers


def one(llm: LLM, **params: Any) -> Any:
    (answer,) = llm.generate("sort 4 1 9 2", SamplingParams(**{"seed": 1, "max_tokens": 40, **params}))
    return answer.outputs[0]


def test_a_length_and_an_end_token_end_a_completion_with_their_reasons(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = one(llm, ignore_eos=True)
    assert (len(free.token_ids), free.finish_reason, free.stop_reason) == (40, "length", None)
    ended = one(llm, logit_bias={EOS: 100.0})
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason, ended.text) == ([EOS], "stop", None, "")
    longest = one(llm, ignore_eos=True, max_tokens=None)
    assert len(longest.token_ids) == 128 - len("sort 4 1 9 2") and longest.finish_reason == "length"


def test_a_stop_token_id_ends_a_completion_and_is_no_part_of_its_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = one(llm, ignore_eos=True)
    wanted = free.token_ids[9]
    first = free.token_ids.index(wanted)
    stopped = one(llm, ignore_eos=True, stop_token_ids=[wanted])
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.text == free.text[:first]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", wanted)
    assert one(llm, ignore_eos=True, stop_token_ids=[wanted], include_stop_str_in_output=True).text == free.text[: first + 1]


def test_a_stop_text_over_several_tokens_cuts_the_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = one(llm, ignore_eos=True)
    wanted = free.text[10:13]
    first = free.text.index(wanted)
    for included, length in ((False, first), (True, first + 3)):
        stopped = one(llm, ignore_eos=True, stop=["never this", wanted], include_stop_str_in_output=included)
        assert stopped.text == free.text[:length] and stopped.token_ids == free.token_ids[: first + 3]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", wanted)
    assert one(llm, ignore_eos=True, stop=["never this"]).text == free.text
    late = one(llm, ignore_eos=True, stop=[wanted], min_tokens=first + 3)
    assert len(late.token_ids) >= first + 3
    slow = one(llm, ignore_eos=True, min_tokens=12).text
    across = one(llm, ignore_eos=True, min_tokens=12, stop=[slow[5:8], slow[10:14]])
    assert (across.text, across.stop_reason) == (slow[:10], slow[10:14])


def test_stop_texts_survive_preemption(make_llm: Callable[..., LLM]) -> None:
    prompts = [f"sort {i} 1 9 2" for i in range(6)]
    roomy = make_llm()
    free = roomy.generate(prompts, SamplingParams(n=2, seed=1, max_tokens=90, ignore_eos=True))
    wanted = [free[i].outputs[0].text[70:73] for i in range(6)]
    params = [SamplingParams(n=2, seed=1, max_tokens=90, ignore_eos=True, stop=[text]) for text in wanted]
    expected = roomy.generate(prompts, params)
    found = make_llm(kv_cache_tokens=192).generate(prompts, params)
    assert [answer.outputs for answer in found] == [answer.outputs for answer in expected]
    assert all(answer.outputs[0].finish_reason == "stop" for answer in found)


def test_min_tokens_keeps_end_tokens_away_without_touching_raw_logprobs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    biased = one(llm, logit_bias={EOS: 100.0}, min_tokens=7)
    assert len(biased.token_ids) == 8 and EOS not in biased.token_ids[:7] and biased.token_ids[7] == EOS
    plain = one(llm, ignore_eos=True, max_tokens=1)
    first = one(llm, logit_bias={EOS: 100.0}, max_tokens=1, logprobs=50).logprobs[0]
    assert first[plain.token_ids[0]].logprob == pytest.approx(plain.raw_logprobs[0], abs=1e-6)
    assert biased.raw_logprobs[7] < -0.1 and biased.sampling_logprobs[7] == pytest.approx(0, abs=1e-6)


def test_adjusted_requests_leave_their_neighbours_bits_alone(make_llm: Callable[..., LLM]) -> None:
    llm, prompts = make_llm(), ["a", "b", "c"]
    plain = SamplingParams(seed=3, max_tokens=20)
    odd = SamplingParams(seed=3, max_tokens=20, logit_bias={5: 3.0}, min_tokens=10, logprobs=3, stop="qqq")
    alone = llm.generate(prompts, plain)
    mixed = llm.generate(prompts, [plain, odd, plain])
    assert [mixed[i].outputs for i in (0, 2)] == [alone[i].outputs for i in (0, 2)]
    entries = mixed[1].outputs[0]
    for token, raw, found in zip(entries.token_ids, entries.raw_logprobs, entries.logprobs or [], strict=True):
        assert found[token].logprob == raw and 3 <= len(found) <= 4


def test_an_abort_answers_with_what_was_drawn_and_frees_everything(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm(max_num_seqs=2, max_num_batched_tokens=16).engine
    params = SamplingParams(n=2, seed=1, max_tokens=50, ignore_eos=True)
    for name, length in (("running", 5), ("prefilling", 60), ("waiting", 9)):
        engine.add_request(name, list(range(3, 3 + length % 37)) * (1 + length // 37), params)
    for _ in range(4):
        engine.step()
    assert engine.abort("running") and engine.abort("waiting") and not engine.abort("unknown")
    engine.check_integrity()
    first = {output.request_id: output for output in engine.step()}
    assert [len(c.token_ids) for c in first["running"].outputs] == [4, 4]
    assert [c.finish_reason for c in first["running"].outputs] == ["abort", "abort"]
    assert [c.token_ids for c in first["waiting"].outputs] == [[], []]
    engine.step()
    assert engine._scheduler.running.prefilling is not None
    assert engine.abort("prefilling") and not engine.abort("prefilling")
    assert set(run(engine)) == {"prefilling"}
    assert engine._scheduler.kv_cache.num_free_blocks == engine.settings.num_blocks


@pytest.mark.parametrize("seed", range(3))
def test_an_abort_storm_loses_no_answer_and_no_block(make_llm: Callable[..., LLM], seed: int) -> None:
    rng = random.Random(seed)
    engine = make_llm(max_num_seqs=6, max_num_batched_tokens=24, kv_cache_tokens=256).engine
    added: list[str] = []
    answers: dict[str, RequestOutput] = {}
    for turn in range(120):
        for _ in range(rng.randrange(3)):
            tokens = [rng.randrange(3, 40) for _ in range(rng.randrange(1, 50))]
            params = SamplingParams(n=rng.randrange(1, 5), max_tokens=rng.randrange(1, 40), stop="ab" if rng.random() < 0.3 else None)
            added.append(f"{turn}-{len(added)}")
            engine.add_request(added[-1], tokens, params, priority=rng.randrange(2))
        for _ in range(rng.randrange(3)):
            engine.abort(rng.choice(added or [""]))
        engine.check_integrity()
        answers.update((output.request_id, output) for output in engine.step())
    answers.update(run(engine))
    assert set(answers) == set(added)
    assert engine._scheduler.kv_cache.num_free_blocks == engine.settings.num_blocks


def test_a_step_that_fails_leaves_an_engine_that_goes_on_with_the_same_bits(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, seed=2, max_tokens=30, logprobs=2)
    expected = make_llm().generate(["sort 4 1 9 2", "x" * 40], params)
    engine = make_llm(max_num_batched_tokens=20).engine
    for i, answer in enumerate(expected):
        engine.add_request(str(i), answer.prompt_token_ids, params, key=i)
    real, calls = engine._runner._sample, 0

    def fail_sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 2, 9):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(engine._runner, "_sample", fail_sometimes)
    answers: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        try:
            answers.update((output.request_id, output) for output in engine.step())
        except KeyboardInterrupt:
            engine.check_integrity()
    assert calls > 9
    assert [answers[str(i)].outputs for i in range(2)] == [answer.outputs for answer in expected]


def test_generate_that_is_interrupted_leaves_no_request_behind(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    expected = llm.generate(["abc"], SamplingParams(seed=1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine._runner, "_sample", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        llm.generate(["abc", "def"], SamplingParams(n=4))
    assert not llm.engine.request_ids
    again = llm.generate(["abc"], SamplingParams(seed=1))
    assert [answer.outputs for answer in again] == [answer.outputs for answer in expected]
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, "prompt is empty"),
        ({"prompt_token_ids": []}, {}, "prompt is empty"),
        ("a" * 128, {}, "128 tokens"),
        ({"prompt_token_ids": [3, 40]}, {}, "token id 40"),
        ({"prompt_token_ids": [-1]}, {}, "token id -1"),
        ({"token_ids": [3]}, {}, "prompt is"),
        ({"prompt": "a", "image": 1}, {}, "'image'"),
        ("a", {"stop_token_ids": [40]}, "stop_token_ids names token 40"),
        ("a", {"logit_bias": {99: 1.0}}, "logit_bias names token 99"),
        ("Ä", {}, "'Ä'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(
    make_llm: Callable[..., LLM], prompt: Any, params: dict[str, Any], words: str
) -> None:
    llm = make_llm()
    with pytest.raises(UserError, match=words) as caught:
        llm.generate(["abc", prompt], SamplingParams(**params))
    assert "\n" not in str(caught.value) and not llm.engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 129}, "max_model_len is 129; the model has 128"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 65}, "max_num_batched_tokens is 64"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
        ({"kv_cache_tokens": 100}, "KV cache has 7 blocks"),
        ({"dtype": "float8"}, "dtype' is 'float8'"),
        ({"load_format": "magic"}, "load_format' is 'magic'"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(make_llm: Callable[..., LLM], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_llm(**settings)


def test_one_sampling_params_for_each_prompt_or_one_for_all(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    short, long = llm.generate(["a", "b"], [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)])
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (2, 5)
    assert llm.generate([], SamplingParams()) == []
    with pytest.raises(UserError, match="2 entries for 1 prompts"):
        llm.generate(["a"], [SamplingParams()] * 2)
    with pytest.raises(UserError, match="request_keys has 1"):
        llm.generate(["a", "b"], SamplingParams(), request_keys=[1])
    seen: list[tuple[int, int]] = []
    llm.generate(["a", "b"], SamplingParams(), on_progress=lambda done, asked: seen.append((done, asked)))
    assert seen[-1] == (2, 2) and seen == sorted(seen)
    (answer,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=3))
    assert answer.prompt is None and answer.prompt_token_ids == [3, 4, 5]


def test_weights_that_are_no_numbers_stop_the_step_with_one_line(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with torch.no_grad():
        llm.engine.decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        llm.generate("abc")
    assert not llm.engine.request_ids
