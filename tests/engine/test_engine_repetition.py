"""A completion that repeats itself is ended early, at the same token whatever else the engine computes."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.config.repetition_detection import RepetitionDetectionParams
from tandem.engine.llm import LLM
from tandem.engine.processing.repetition import repeats
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.types import UserError

LOOKED_FOR = RepetitionDetectionParams(max_pattern_size=6, min_pattern_size=1, min_count=3)


def by_definition(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Writes the last ``min_count`` occurrences of every pattern down, and compares."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        parts = [tokens[len(tokens) - (place + 1) * size : len(tokens) - place * size] for place in range(params.min_count)]
        if len(tokens) >= size * params.min_count and all(part == parts[0] for part in parts):
            return True
    return False


def test_repetitions_are_those_of_the_definition() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(3000):
        pattern = [draw.randrange(3) for _ in range(draw.randint(1, 7))]
        tokens = [draw.randrange(3) for _ in range(draw.randint(0, 5))] + pattern * draw.randint(0, 4) + pattern[: draw.randint(0, 2)]
        smallest = draw.randint(1, 3)
        params = RepetitionDetectionParams(draw.randint(smallest, 6), smallest, draw.randint(2, 4))
        assert repeats(tokens, params) == by_definition(tokens, params), (tokens, params)
        seen.add(by_definition(tokens, params))
    assert seen == {True, False}


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}])
def test_a_greedy_loop_is_ended_after_its_last_allowed_repetition(options: dict[str, Any], make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(**options)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = ["sort 4 1 9 2", "abc", "a 1 b 2"]
    free = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]
    expected = [next((end for end in range(1, 101) if by_definition(tokens[:end], LOOKED_FOR)), 100) for tokens in free]
    assert min(expected) < 60, "a random model must fall into a loop"
    watched = llm.generate(prompts, replace(params, repetition_detection=LOOKED_FOR), use_tqdm=False)
    for answer, tokens, end in zip(watched, free, expected, strict=True):
        (output,) = answer.outputs
        assert output.token_ids == tokens[:end] and output.finish_reason == ("repetition" if end < 100 else "length")


def test_wrong_settings_are_refused() -> None:
    for params, words in ((RepetitionDetectionParams(4, 5, 2), "min_pattern_size' is 5"), (RepetitionDetectionParams(4, 1, 1), "min_count' is 1")):
        with pytest.raises(UserError, match=words):
            SamplingParams(repetition_detection=params)
    with pytest.raises(UserError, match="give a RepetitionDetectionParams"):
        SamplingParams(repetition_detection={"min_count": 3})  # type: ignore[arg-type]
