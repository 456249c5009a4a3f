"""Random loads with arrivals, aborts, preemption and failures: every request draws the tokens that it draws alone."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams

Drawn = list[tuple[list[int], list[float], list[float], str, str]]


def drawn(completions: list[CompletionOutput]) -> Drawn:
    return [(c.token_ids, c.raw_logprobs, c.sampling_logprobs, c.finish_reason, c.text) for c in completions]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.randrange(1, 4),
        max_tokens=rng.randrange(1, 60),
        temperature=rng.choice((0.5, 1.0, 1.5)),
        top_k=rng.choice((0, 0, 7)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.05)),
        stop=rng.choice((None, None, ["ab", "q"])),
        logit_bias=rng.choice((None, None, {rng.randrange(3, 40): 2.0})),
        seed=rng.randrange(3),
        ignore_eos=rng.random() < 0.5,
    )


def check_random_load(make_llm: Callable[..., LLM], seed: int, requests: int, **settings: Any) -> None:
    rng = random.Random(seed)
    alone = make_llm(max_num_seqs=4, **{k: v for k, v in settings.items() if k == "kernels"})
    engine = make_llm(
        max_num_seqs=rng.choice((3, 8)), max_num_batched_tokens=rng.choice((8, 24, 200)),
        kv_cache_tokens=rng.choice((128, 192, 2048)), enable_prefix_caching=rng.random() < 0.7,
        swap_space=rng.choice((0.0, 2**-15, 2**-12)),
        speculative_config=rng.choice(
            (
                None, {"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft", "model": rng.randrange(2)},
                {"method": "suffix", "num_speculative_tokens": 5},
            )
        ), **settings,
    ).engine
    stem = [rng.randrange(3, 40) for _ in range(40)]
    asked: dict[str, tuple[list[int], SamplingParams, int]] = {}
    answers: dict[str, RequestOutput] = {}
    aborted = set()
    while len(answers) < requests:
        if len(asked) < requests and rng.random() < 0.5:
            tokens = stem[: rng.randrange(1, 41)] + [rng.randrange(3, 40) for _ in range(rng.randrange(4))]
            name, params, key = str(len(asked)), random_params(rng), rng.randrange(1000)
            asked[name] = (tokens, params, key)
            engine.add_request(name, tokens, params, key=key, priority=rng.randrange(2))
        if asked and rng.random() < 0.02:
            name = rng.choice(list(asked))
            if engine.abort(name):
                aborted.add(name)
        answers.update((output.request_id, output) for output in engine.step())
        engine.check_integrity()
    for name, (tokens, params, key) in asked.items():
        found = drawn(answers[name].outputs)
        (expected,) = alone.generate([{"prompt_token_ids": tokens}], params, request_keys=[key])
        if name not in aborted:
            assert found == drawn(expected.outputs), (seed, name)
        for (ids, raw, *_), whole in zip(found, drawn(expected.outputs), strict=True):
            assert (ids, raw) == (whole[0][: len(ids)], whole[1][: len(ids)])


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_draw_what_each_request_draws_alone(make_llm: Callable[..., LLM], seed: int) -> None:
    check_random_load(make_llm, seed, requests=25)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_loads_draw_what_each_request_draws_alone(
    make_llm: Callable[..., LLM], seed: int, kernels: str
) -> None:
    check_random_load(make_llm, seed, requests=60, kernels=kernels)
