"""OpenAI's API with OpenAI's client, against the engine and transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from server_process import Server

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

PROMPTS = ["the quick brown", "你好 1234", "x"]


@pytest.fixture(scope="module")
def client(shared: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0)


def test_greedy_text_equals_the_engines_and_transformers(shared: Server, llm: LLM, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    offline = llm.generate(PROMPTS, params)
    body = shared.complete(PROMPTS, temperature=0, max_tokens=24, ignore_eos=True, return_token_ids=True)
    assert [choice["text"] for choice in body["choices"]] == [answer.outputs[0].text for answer in offline]
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for choice, answer in zip(body["choices"], offline, strict=True):
        prompt = torch.tensor([answer.prompt_token_ids])
        with torch.no_grad():
            drawn = peer.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert choice["token_ids"] == drawn[0, prompt.shape[1] :].tolist()


def test_sampled_answers_depend_on_the_request_alone(shared: Server, llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=30, temperature=0.8, top_p=0.9)
    (answer,) = llm.generate(PROMPTS[0], params)
    fields: dict[str, Any] = {"n": 3, "seed": 7, "max_tokens": 30, "temperature": 0.8, "top_p": 0.9}
    first, again = shared.complete(PROMPTS[0], **fields), shared.complete(PROMPTS[0], **fields)
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in again["choices"]] == [c.text for c in answer.outputs]
    unseeded = {shared.complete(PROMPTS[0], max_tokens=20)["choices"][0]["text"] for _ in range(4)}
    assert len(unseeded) == 4


def test_the_sdk_completes_and_counts(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=8, seed=1, logprobs=2, extra_body={"ignore_eos": True})
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "tiny"
    (offline,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=1, logprobs=2, ignore_eos=True))
    choice, expected = answer.choices[0], offline.outputs[0]
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs == expected.raw_logprobs
    assert [2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs or []] == [True] * 8
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(offline.prompt_token_ids), 8)
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").id == "also-tiny"


@pytest.mark.parametrize("extra", [{}, {"stop": ["e", "a"], "n": 2}, {"logprobs": 1, "echo": True}, {"max_tokens": 1}])
def test_a_stream_put_together_is_the_answer(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 40, "seed": 3, **extra}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    for expected in whole.choices:
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index]
        assert "".join(part.text for part in parts) == expected.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        if expected.logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [x for part in parts for x in getattr(part.logprobs, name)] == getattr(expected.logprobs, name)


def test_the_bytes_of_a_stream_are_events_and_done(shared: Server) -> None:
    response = shared.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 3, "ignore_eos": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_chat_goes_through_the_models_template(client: openai.OpenAI, llm: LLM) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    (offline,) = llm.generate(
        {"prompt_token_ids": llm.engine.tokenizer.encode("[user] hi\nyou\n[assistant] ")}, SamplingParams(max_tokens=12, temperature=0)
    )
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", offline.outputs[0].text)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == offline.outputs[0].raw_logprobs
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_a_chat_without_a_limit_goes_on_to_the_end_of_its_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == 512


def test_the_async_sdk_streams_many_at_once(shared: Server) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=20, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:
            texts = await asyncio.gather(*(one(client, seed) for seed in range(20)))
            alone = await client.completions.create(model="tiny", prompt="abc", max_tokens=20, seed=13)
        return texts, alone.choices[0].text

    texts, alone = asyncio.run(all_of_them())
    assert texts[13] == alone and len(set(texts)) == 20


def test_echo_scores_a_prompt_as_transformers_does(shared: Server, model: Path, llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    text = "the lazy dog 😀"
    logprobs = shared.complete(text, echo=True, max_tokens=0, logprobs=1)["choices"][0]
    tokens = torch.tensor([llm.engine.tokenizer.encode(text)])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits.double()
    expected = logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None]).squeeze(1)
    assert logprobs["text"] == text and logprobs["logprobs"]["token_logprobs"][0] is None
    assert logprobs["logprobs"]["token_logprobs"][1:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_echoed_logprobs_have_the_form_of_openai_and_vllm(shared: Server, llm: LLM) -> None:
    """Every token has its text and the offset of its beginning; only the first has no log-probability, as nothing precedes it."""
    text = "the lazy dog"
    choice = shared.complete(text, echo=True, max_tokens=4, logprobs=2, temperature=0)["choices"][0]
    found = choice["logprobs"]
    prompt = [llm.engine.tokenizer.decode([token]) for token in llm.engine.tokenizer.encode(text)]
    assert len(prompt) > 2 and found["tokens"][: len(prompt)] == prompt and "".join(prompt) == text
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value is not None for name in ("token_logprobs", "top_logprobs") for value in found[name][1:])
    assert choice["text"].startswith(text) and len(found["tokens"]) == len(prompt) + 4
    streamed = shared.complete_stream(text, echo=True, max_tokens=4, logprobs=2, temperature=0).split("\n\n")[:-2]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["logprobs"] for event in streamed]
    assert {name: [value for part in parts for value in part[name]] for name in found} == found


def test_cached_tokens_are_counted(shared: Server) -> None:
    prompt = "a prompt of more than one block of sixteen tokens, " * 3
    before = shared.metric("vllm:prefix_cache_hits_total")
    first, second = (shared.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2))
    assert first == 0 and second >= 16 and second % 16 == 0
    assert shared.metric("vllm:prefix_cache_hits_total") == before + second
    assert shared.complete(prompt, max_tokens=2, cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_generate_gives_tokens_logprobs_and_versions_as_the_engine_does(shared: Server, llm: LLM) -> None:
    tokens = llm.engine.tokenizer.encode(PROMPTS[0])
    (expected,) = llm.generate({"prompt_token_ids": tokens}, SamplingParams(n=2, seed=5, max_tokens=10, logprobs=1), request_keys=[42])
    body = {"prompt_token_ids": tokens, "key": 42, "sampling_params": {"n": 2, "seed": 5, "max_tokens": 10, "logprobs": 1}}
    found = shared.post("/generate", body).json()
    for output, completion in zip(found["outputs"], expected.outputs, strict=True):
        for name in ("token_ids", "raw_logprobs", "sampling_logprobs", "text", "finish_reason"):
            assert output[name] == getattr(completion, name)
        assert output["weight_versions"] == [[0, 0]] * len(completion.token_ids)
    streamed = shared.post("/generate", {**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in streamed[:-2]]
    assert [t for part in parts for o in part["outputs"] if o["index"] == 1 for t in o["token_ids"]] == expected.outputs[1].token_ids


def test_structured_output_by_response_format(shared: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"], "additionalProperties": False}
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "seed": 1}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = shared.post("/v1/chat/completions", {**fields, "response_format": form}).json()
    assert 0 <= json.loads(answer["choices"][0]["message"]["content"])["a"] <= 9
    chosen = shared.complete("x", structured_outputs={"choice": ["yes", "no"]})["choices"][0]["text"]
    assert chosen in ("yes", "no")
    assert shared.complete("x", guided_choice=["yes", "no"])["choices"][0]["text"] in ("yes", "no")
    guided = shared.post("/v1/chat/completions", {**fields, "guided_json": schema}).json()
    assert guided["choices"][0]["message"] == answer["choices"][0]["message"]


def test_tokenize_and_detokenize_are_inverse(shared: Server, llm: LLM) -> None:
    text = "naïve 😀 <eos> dog"
    found = shared.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == llm.engine.tokenizer.encode(text) and found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert shared.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = shared.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert shared.post("/detokenize", {"tokens": chat["tokens"]}).json() == {"prompt": "[user] x\n[assistant] "}
