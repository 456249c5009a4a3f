"""A completion that one request begins and another continues: the tokens of a single request, wherever it is cut."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.engine.engine import Engine
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, Continuation
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import UserError, WeightVersion

PROMPT = "sort 4 1 9 2"
PARAMS = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)


def draw(engine: Engine, params: SamplingParams, index: int, continues: Continuation | None = None) -> CompletionOutput:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    engine.add_request("one", tokenizer.encode(PROMPT), params, key=7, first_index=index, continues=continues)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    engine.check_integrity()
    return outputs[0].outputs[0]


def beginning(whole: CompletionOutput, length: int) -> Continuation:
    return Continuation(whole.token_ids[:length], whole.raw_logprobs[:length], whole.sampling_logprobs[:length], whole.weight_versions[:length])


STATIC = {"batching": "static", "cache_implementation": "static", "max_num_batched_tokens": 128}


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, STATIC])
def test_a_completion_cut_at_any_token_and_continued_is_the_whole_one(options: dict[str, Any], make_llm: Callable[..., LLM]) -> None:
    engine = make_llm(**options).engine
    whole = draw(engine, PARAMS, index=2)
    for length in (1, 3, 4, 5, 20, 39):
        cut = draw(engine, replace(PARAMS, max_tokens=length), index=2)
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:length], "length")
        assert draw(engine, PARAMS, index=2, continues=beginning(cut, length)) == replace(whole, index=0)
    assert draw(engine, PARAMS, index=1).token_ids != whole.token_ids


def test_a_stop_text_that_was_begun_before_the_cut_ends_the_continued_completion(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    whole = draw(engine, PARAMS, index=0)
    stop = whole.text[10:13]
    params = replace(PARAMS, stop=[stop])
    stopped = draw(engine, params, index=0)
    assert stopped.finish_reason == "stop" and stopped.text == whole.text[: whole.text.index(stop)]
    for length in (len(stopped.token_ids) - 1, len(stopped.token_ids) - 2):
        assert draw(engine, params, index=0, continues=beginning(whole, length)) == stopped


def test_tokens_after_an_update_have_its_version_and_are_those_of_the_new_weights_after_the_old_tokens(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Any]
) -> None:
    llm, fresh = make_llm(), make_llm(weights=1)
    old = draw(llm.engine, replace(PARAMS, max_tokens=10), index=0)
    llm.update_weights(read_tensors(make_folder("qwen3", 1)), WeightVersion(1, 5))
    both = draw(llm.engine, PARAMS, index=0, continues=beginning(old, 10))
    assert [version.step for version in both.weight_versions] == [old.weight_versions[0].step] * 10 + [5] * 30
    assert (both.token_ids[:10], both.raw_logprobs[:10]) == (old.token_ids, old.raw_logprobs)
    # An engine that only ever had the new weights, given the old tokens as part of its prompt.
    tokenizer = fresh.engine.tokenizer
    assert tokenizer is not None
    fresh.engine.add_request("one", tokenizer.encode(PROMPT) + old.token_ids, replace(PARAMS, max_tokens=30), key=7)
    outputs = []
    while fresh.engine.has_unfinished_requests:
        outputs += fresh.engine.step()
    (answer,) = outputs[0].outputs
    assert (answer.token_ids, answer.raw_logprobs) == (both.token_ids[10:], both.raw_logprobs[10:])


def test_what_cannot_be_continued_is_refused_in_one_line(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    begun = beginning(draw(engine, PARAMS, index=0), 10)
    for params, words in (
        (replace(PARAMS, n=2), "n is 2"), (replace(PARAMS, max_tokens=10), "10 tokens already"), (replace(PARAMS, logprobs=3), "cannot be continued"),
        (replace(PARAMS, logit_bias={5: 1.0}), "cannot be continued"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            draw(engine, params, index=0, continues=begun)
    assert not engine.has_unfinished_requests
