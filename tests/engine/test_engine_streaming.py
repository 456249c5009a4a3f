"""Streams: the incremental outputs, concatenated, equal the output of a request that is not streamed, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise
from tandem.types import UserError

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog"]
LISTS = ("token_ids", "raw_logprobs", "sampling_logprobs", "weight_versions")


def run(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[list[RequestOutput]]:
    """Returns all outputs of each prompt, in order."""
    assert llm.engine.tokenizer is not None
    found: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), llm.engine.tokenizer.encode(prompt, add_special_tokens=True), params, prompt=prompt, key=i)
    while llm.engine.has_unfinished_requests:
        for output in llm.engine.step():
            found[output.request_id].append(output)
    llm.engine.check_integrity()
    for outputs in found.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return list(found.values())


def joined(outputs: list[RequestOutput], n: int) -> list[CompletionOutput]:
    """Returns the completions assembled from a stream of deltas."""
    whole = []
    for index in range(n):
        parts = [part for output in outputs for part in output.outputs if part.index == index]
        assert all(part.finish_reason is None for part in parts[:-1]) and len(parts) > 1
        lists = {name: [entry for part in parts for entry in getattr(part, name)] for name in LISTS}
        logprobs = [entry for part in parts for entry in part.logprobs or []] if parts[0].logprobs is not None else None
        whole.append(replace(parts[-1], text="".join(part.text for part in parts), logprobs=logprobs, **lists))
    return whole


@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_tokens": 128}, {"max_num_batched_tokens": 7, "max_num_seqs": 4, "enable_prefix_caching": False}]
)
@pytest.mark.parametrize("extra", [{}, {"logprobs": 2, "ignore_eos": True}, {"stop": ["e", "ab"], "min_tokens": 5}])
def test_deltas_put_together_are_the_answer(make_llm: Callable[..., LLM], settings: dict[str, Any], extra: dict[str, Any]) -> None:
    params = SamplingParams(n=3, max_tokens=40, seed=11, temperature=0.9, **extra)
    expected = make_llm().generate(PROMPTS, params)
    found = run(make_llm(**settings), PROMPTS, replace(params, output_kind=RequestOutputKind.DELTA))
    assert [joined(outputs, 3) for outputs in found] == [answer.outputs for answer in expected]
    assert [outputs[-1].num_cached_tokens for outputs in found] == [0] * len(PROMPTS)


def test_cumulative_outputs_grow_to_the_answer(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(n=2, max_tokens=20, seed=1, stop="zz", logprobs=1)
    expected = make_llm().generate(PROMPTS, params)
    found = run(make_llm(), PROMPTS, replace(params, output_kind=RequestOutputKind.CUMULATIVE))
    for outputs, answer in zip(found, expected, strict=True):
        assert outputs[-1].outputs == answer.outputs
        for before, after in pairwise(outputs):
            for part in before.outputs:
                later = next((p for p in after.outputs if p.index == part.index), part)
                assert later.text.startswith(part.text) and later.token_ids[: len(part.token_ids)] == part.token_ids


def test_no_delta_shows_a_part_of_a_stop_text(make_llm: Callable[..., LLM]) -> None:
    (free,) = make_llm().generate(PROMPTS[1], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    wanted = free.outputs[0].text[10:14]
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, stop=wanted, output_kind=RequestOutputKind.DELTA)
    (outputs,) = run(make_llm(), [PROMPTS[1]], params)
    assert joined(outputs, 1)[0].text == free.outputs[0].text[: free.outputs[0].text.index(wanted)]
    assert outputs[-1].outputs[0].stop_reason == wanted


def test_prompt_scores_come_with_the_first_delta_alone(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=5, seed=1, prompt_logprobs=1, ignore_eos=True)
    (answer,) = make_llm().generate(PROMPTS[1], params)
    (outputs,) = run(make_llm(), [PROMPTS[1]], replace(params, output_kind=RequestOutputKind.DELTA))
    assert outputs[0].prompt_logprobs == answer.prompt_logprobs is not None
    assert len(outputs) == 5 and all(output.prompt_logprobs is None for output in outputs[1:])
    (outputs,) = run(make_llm(), [PROMPTS[1]], replace(params, max_tokens=0, output_kind=RequestOutputKind.DELTA))
    assert len(outputs) == 1 and outputs[0].outputs[0].token_ids == [] and outputs[0].prompt_logprobs == answer.prompt_logprobs


def test_an_aborted_stream_ends_with_what_was_not_handed_out(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [3, 4, 5], SamplingParams(max_tokens=50, ignore_eos=True, output_kind=RequestOutputKind.DELTA), key=0)
    first = engine.step() + engine.step()
    assert [len(output.outputs[0].token_ids) for output in first] == [1, 1]
    assert engine.abort("a")
    (last,) = engine.step()
    assert (last.finished, last.outputs[0].finish_reason, last.outputs[0].token_ids) == (True, "abort", [])
    assert not engine.has_unfinished_requests


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that generates single bytes, most of them parts of characters that are never completed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = tmp_path_factory.mktemp("bytes")
    backend.save(str(tokenizer / "tokenizer.json"))
    shapes = ModelShapes(
        architecture="qwen3", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, max_position_embeddings=256, tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    decoder = Decoder(shapes, select("reference"))
    initialise(decoder, 0)
    save_model(decoder, tokenizer / "model", tokenizer)
    return tokenizer / "model"


def test_no_delta_shows_half_a_character(bytes_model: Path) -> None:
    llm = LLM(bytes_model, max_num_seqs=4)
    assert llm.engine.tokenizer is not None
    smile = llm.engine.tokenizer.encode("é你😀 ")
    params = SamplingParams(max_tokens=64, seed=5, allowed_token_ids=sorted(set(smile)), output_kind=RequestOutputKind.DELTA)
    (outputs,) = run(llm, ["é"], params)
    (whole,) = joined(outputs, 1)
    assert whole.text == llm.engine.tokenizer.decode(whole.token_ids)
    assert any(not part.text for output in outputs for part in output.outputs) and "\N{REPLACEMENT CHARACTER}" in whole.text


def test_generate_refuses_to_stream(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="output_kind is DELTA"):
        make_llm().generate("a", SamplingParams(output_kind=RequestOutputKind.DELTA))
