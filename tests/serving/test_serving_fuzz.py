"""Any value in any field of any route: an answer of 2xx or 4xx in the error format, at once, and a server that keeps running."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_process import Server, server

CHAT = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SAMPLING = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "prompt_logprobs", "bad_words", "allowed_token_ids", "logit_bias",
    "truncate_prompt_tokens", "structured_outputs", "skip_special_tokens", "max_tokens", "logprobs",
)  # fmt: skip
OPENAI = (*SAMPLING, "model", "stream", "stream_options", "priority", "request_id", "cache_salt", "num_draft_tokens", "return_token_ids",
          "add_special_tokens", "user", "metadata", "suffix", "tools", "tool_choice", "guided_json", "guided_choice", "echo")  # fmt: skip
ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 2}, (*OPENAI, "prompt")),
    "/v1/chat/completions": (
        {"messages": CHAT, "max_tokens": 2}, (*OPENAI, "messages", "max_completion_tokens", "top_logprobs", "response_format", "chat_template_kwargs",
         "parallel_tool_calls", "include_reasoning", "reasoning_effort"),
    ),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 2},
        ("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "stream", "store", "metadata", "reasoning",
         "reasoning.effort", "parallel_tool_calls", "structured_outputs", "temperature", "stop", "n", "seed", "cache_salt", "chat_template_kwargs"),
    ),
    "/v1/messages": (
        {"messages": CHAT, "max_tokens": 2},
        ("model", "messages", "system", "tools", "tool_choice", "tool_choice.type", "stop_sequences", "stream", "thinking", "thinking.type", "max_tokens",
         "structured_outputs", "top_k", "n", "chat_template_kwargs"),
    ),
    "/generate": (
        {"prompt": "x", "sampling_params": {"max_tokens": 2}},
        ("model", "prompt", "prompt_token_ids", "sampling_params", "stream", "priority", "request_id", "cache_salt", "num_draft_tokens", "key", "first_index",
         *(f"sampling_params.{name}" for name in SAMPLING)),
    ),
    "/tokenize": (
        {"prompt": "x"}, ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs", "chat_template_kwargs"),
    ),
    "/detokenize": ({"tokens": [5]}, ("model", "tokens")),
    "/abort_requests": ({}, ("request_ids",)),
    "/start_weight_update": ({}, ("version",)),
    "/update_weights": ({"update_info": {"folder": "."}}, ("update_info", "update_info.folder")),
    "/init_weight_transfer_engine": ({}, ("init_info", "init_info.backend")),
    "/v1/load_lora_adapter": ({"lora_name": "a", "lora_path": "."}, ("lora_name", "lora_path", "load_inplace")),
    "/v1/unload_lora_adapter": ({"lora_name": "a"}, ("lora_name",)),
}  # fmt: skip
TARGETS = [(route, field) for route, (_, fields) in ROUTES.items() for field in fields]


PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml", "--reasoning-parser", "deepseek_r1")


def nested(depth: int, leaf: Any = 1) -> Any:
    for i in range(depth):
        leaf = [leaf] if i % 2 else {"a": leaf}
    return leaf


SURROGATES = ["\ud800", "a\udfffb", "\udc80", "\ud83d \ude00", "\ude00\ud83d"]
TEXTS = [
    "", "x", "\0", "a\nb\r\u2028c", "\ufffe\uffff", "\U0010ffff", "e\u0301" * 50, "\u202e\u0000", "<eos>", "{{ 7*7 }}", "../../etc", "x" * 4000, *SURROGATES
]  # fmt: skip
NUMBERS = [0, -1, 1, 2, 3.5, -0.0, 1e-308, 1e308, 1e18, 2**31, 2**31 - 1, 2**63, -(2**63) - 1, 10**30, math.nan, math.inf, -math.inf, 1025, 10**9]
LEAVES = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.text(max_size=8), st.integers(-3, 320))
SPECIAL = st.sampled_from(
    [nested(60), nested(127), nested(500, "\ud800"), ["x"] * 2000, [[1]] * 2000, list(range(3, 290)), [5] * 513, {str(i): 0.5 for i in range(299)},
     {str(i): 1 for i in range(1000)}, {"\ud800": 1}, [{}] * 3000, {"role": "user"}, CHAT * 300, [{"role": "\ud800", "content": "x"}],
     [{"role": "user", "content": [{"type": "text", "text": "\udc80"}]}], TOOLS, {"type": "json_object"},
     {"type": "json_schema", "json_schema": {"name": "n", "schema": nested(90)}},
     {"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud800"]}}},
     {"json": nested(100)}, {"regex": "(a{1,1000}){1,1000}"}, {"regex": "\ud800"}, {"choice": ["\udfff"]}, {"choice": ["a"] * 5000},
     {"grammar": "start: start"}, {"json": {"type": "string", "maxLength": 10**18}}, {"messages": []}, {"max_tokens": 1e18},
     [{"type": "function", "name": "f", "parameters": {"$ref": "#/x"}}], {"type": "function", "name": "f"},
     [{"name": "f", "input_schema": nested(90)}], {"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, "required", "auto",
     [{"type": "function_call", "name": 5, "arguments": {}}, {"type": "function_call_output", "output": [5]}], [{"type": "reasoning", "content": 5}],
     [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {"format": {"type": "json_schema"}},
     [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}], [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]]
)  # fmt: skip
VALUES = st.one_of(
    LEAVES, SPECIAL,
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "5", "\ud800"]), inner, max_size=3), max_leaves=8),
)  # fmt: skip


def put(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    first, _, rest = field.partition(".")
    return {**body, first: {**body.get(first, {}), rest: value} if rest else value}


def answered(running: Server, path: str, content: bytes, surrogates: bool = False) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer control"}
    response = running.client.post(running.url + path, content=content, headers=headers, timeout=20)
    # 429: more prompts than the queue holds.
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, content[:500], response.text[:500])
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 1000
        assert not surrogates or response.status_code == 400
    return response


def fuzz(running: Server, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(target=st.sampled_from(TARGETS), value=VALUES, second=st.sampled_from(TARGETS), other=VALUES, raw=st.booleans(), several=st.booleans())
    @example(("/v1/completions", "user"), "\ud800", ("/generate", "model"), None, True, False)
    def check(target: tuple[str, str], value: Any, second: tuple[str, str], other: Any, raw: bool, several: bool) -> None:
        path, field = target
        body = put(ROUTES[path][0], field, value)
        if several and second[0] == path and "." not in second[1]:
            body = put(body, second[1], other)
        if isinstance(body.get("n"), int) and 2 < body["n"] <= 1024:
            return  # Legal, and slow.
        text = json.dumps(body, ensure_ascii=not raw)
        content = text.encode("utf-8", "surrogatepass")
        bad = any("\ud800" <= c <= "\udfff" for c in json.dumps(body, ensure_ascii=False))
        answered(running, path, content, surrogates=bad)

    check()
    assert running.process.poll() is None and "Traceback" not in running.log.read_text(), running.log.read_text()[-4000:]


@pytest.fixture(scope="module")
def fuzzed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(model, tmp_path_factory.mktemp("fuzz"), "--max-num-seqs", "32", "--enable-lora", *PARSERS) as running:
        yield running
        running.wait_idle()
        assert running.complete("x", max_tokens=1)["choices"]


@pytest.mark.parametrize(("path", "field"), TARGETS)
def test_a_lone_surrogate_in_any_field_is_400(shared: Server, path: str, field: str) -> None:
    for value in ("\ud800", ["\udfff"], {"\ud83d": 1}):
        content = json.dumps(put(ROUTES[path][0], field, value)).encode()
        assert "lone surrogate" in answered(shared, path, content, surrogates=True).json()["error"]["message"]


@pytest.mark.full
def test_random_values_in_random_fields_never_fail_the_server(fuzzed: Server) -> None:
    fuzz(fuzzed, 200)


@pytest.mark.full
def test_many_random_values_in_random_fields_never_fail_the_server(fuzzed: Server) -> None:
    fuzz(fuzzed, 5000)


ABSURD = {
    "n": 10**9, "max_tokens": 1e18, "best_of": 10**9, "logprobs": 10**9, "prompt_logprobs": 10**9, "stop": [f"s{i}" for i in range(100_000)],
    "logit_bias": {str(i): 1 for i in range(50_000)}, "temperature": math.nan, "top_p": math.inf, "min_tokens": 10**18, "priority": 10**30,
    "stop_token_ids": [5] * 100_000, "bad_words": ["a"] * 100_000, "truncate_prompt_tokens": -5, "prompt": [5] * 100_000, "seed": 10**40,
    "structured_outputs": {"choice": [f"c{i}" for i in range(60_000)]}, "cache_salt": "x" * 500_000, "stream_options": [{}] * 100_000,
    "allowed_token_ids": ["x"] * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("field", ABSURD)
def test_an_absurd_value_is_400(shared: Server, field: str) -> None:
    content = json.dumps({"prompt": "x", field: ABSURD[field]}).encode()
    assert answered(shared, "/v1/completions", content).status_code == 400


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prompt": ' + b"[" * 10**6, 400),
        (b'{"a":' * 10**5 + b"1" + b"}" * 10**5, 400),
        (b'{"prompt": "x", "user": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 10**6 + b"}", 400),
        (json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(10**6)}}).encode(), 413),
        (json.dumps({"prompt": [{}] * 200_000}).encode(), 400),
        (json.dumps({"prompt": ["x"] * 100_000}).encode(), 429),
        (b'{"prompt": "\xed\xa0\x80"}', 400),
        ('{"prompt": "x"}'.encode("utf-16"), 400),
    ],
    ids=["brackets", "objects", "nested", "digits", "biases", "wrong prompts", "prompts", "raw surrogate", "utf-16"],
)
def test_an_absurd_body_is_refused(shared: Server, content: bytes, status: int) -> None:
    response = answered(shared, "/v1/completions", content)
    assert response.status_code == status, response.text
