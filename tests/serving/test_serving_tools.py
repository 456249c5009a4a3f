"""Tools and reasoning in chat completions, with OpenAI's clients. What the model writes is forced by a structured output, so that it is known."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import Server
from tool_server import ADD, API_KEY, CALLS, NOW, TEMPLATE, writing

from tandem.config.engine import EngineArgs
from tandem.engine.structured_output.manager import StructuredOutputManager
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.serving.forced_format import after_reasoning
from tandem.serving.prompts import _plain, _with_text_arguments
from tandem.serving.protocol import ChatMessage
from tandem.serving.settings import ServerSettings
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": NOW, "strict": True}},
]
MESSAGES: Any = [{"role": "user", "content": "1+2?"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 1, "max_tokens": 300}


@pytest.fixture(scope="module")
def client(running: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=API_KEY, max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """Returns the answer that OpenAI's own client puts together of a stream."""
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def test_calls_that_the_model_writes_are_parsed_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    fields = {**ASKED, "extra_body": writing(f"Let me see.\n{CALLS}")}
    for answer in (client.chat.completions.create(**fields), streamed(client, **fields)):
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
        calls = choice.message.tool_calls
        assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [("function", "add", {"a": 1, "b": 2}), ("function", "now", {})]
        assert len({c.id for c in calls}) == 2 and all(c.id.startswith("call_") for c in calls)


def test_the_deltas_of_a_call_begin_with_its_id_and_name_and_its_arguments_follow_as_they_are_written(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**ASKED, stream=True, extra_body=writing(CALLS)))
    assert all(chunk.choices[0].delta.model_fields_set or chunk.choices[0].finish_reason for chunk in chunks)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    for index, name in enumerate(("add", "now")):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert first.id and first.function is not None and first.function.name == name
        assert all(other.id is None and other.function is not None and other.function.name is None for other in others)
    assert len([delta for delta in deltas if delta.index == 0]) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_one_call_where_parallel_calls_are_off_and_none_where_tools_are(client: openai.OpenAI) -> None:
    for each in (client.chat.completions.create, lambda **fields: streamed(client, **fields)):
        (choice,) = each(**ASKED, parallel_tool_calls=False, extra_body=writing(CALLS)).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["add"] and not choice.message.content
        (choice,) = each(**{**ASKED, "tool_choice": "none"}, extra_body=writing(CALLS)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALLS, None, "stop")


def test_what_is_no_call_is_content_and_a_call_that_is_cut_has_the_reason_length(client: openai.OpenAI) -> None:
    broken = '<tool_call>{"nome": "add"}</tool_call>'
    (choice,) = client.chat.completions.create(**ASKED, extra_body=writing(broken)).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (broken, None, "stop")
    (choice,) = client.chat.completions.create(**{**ASKED, "max_tokens": 50}, extra_body=writing(CALLS)).choices
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_required_or_named_matches_the_tools_schema(client: openai.OpenAI, choice: Any) -> None:
    import jsonschema_rs

    schemas = {"add": ADD, "now": NOW}
    for seed in range(3):
        fields = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        whole = client.chat.completions.create(**fields)
        (called,) = whole.choices[0].message.tool_calls or []
        jsonschema_rs.validate(schemas[called.function.name], json.loads(called.function.arguments))
        assert whole.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert isinstance(choice, str) or called.function.name == "add"
        (again,) = streamed(client, **fields).choices[0].message.tool_calls
        assert (again.function.name, again.function.arguments) == (called.function.name, called.function.arguments)


def test_the_prompt_of_a_conversation_with_tools_is_that_of_transformers(running: Server, tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"}
    messages = [*MESSAGES, asked, {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
    found = running.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    # Templates read arguments as values and the reasoning under its earlier name.
    plain = json.loads(json.dumps(messages))
    plain[1]["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": 2}
    plain[1]["reasoning_content"] = plain[1].pop("reasoning")
    peer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert found == peer.encode(peer.apply_chat_template(plain, tools=TOOLS, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True, opening="(o)"))
    usage = running.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(found)


def test_a_template_that_writes_arguments_as_they_are_given_gets_text() -> None:
    message = ChatMessage(role="assistant", content=None, tool_calls=[{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"é": 1}'}}])
    assert _with_text_arguments(_plain(message, 0))["tool_calls"][0]["function"]["arguments"] == '{"é": 1}'


def test_reasoning_is_a_field_of_its_own(client: openai.OpenAI) -> None:
    text = "<think>\nI add.\n</think>\n\nIt is 3."
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100}
    message = client.chat.completions.create(**fields, extra_body=writing(text)).choices[0].message
    assert (message.content, message.model_extra) == ("It is 3.", {"reasoning": "I add.", "reasoning_content": "I add."})
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True, extra_body=writing(text))]
    assert "".join(delta.content or "" for delta in deltas) == "It is 3."
    for name in ("reasoning", "reasoning_content"):
        parts = [delta.model_extra[name] for delta in deltas if delta.model_extra and name in delta.model_extra]
        assert "".join(parts) == "I add." and len(parts) > 1
    hidden = client.chat.completions.create(**fields, extra_body={**writing(text), "include_reasoning": False}).choices[0].message
    assert hidden.content == "It is 3." and hidden.model_extra["reasoning"] is None


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"json": ADD}, '{"a": 1, "b": 2}', '{"a": 1}'), ({"choice": ['"é" 😀', "no"]}, '"é" 😀', "nay"), ({"regex": "[0-9]+/[a-z]"}, "12/x", "12x"),
        ({"json_object": True}, "{}", "[]"), ({"regex": r"a\/b/[\\]"}, "a/b/\\", "a/b"),
    ],
)  # fmt: skip
def test_a_format_behind_reasoning_leaves_the_reasoning_free(tokenizer_folder: Path, wanted: dict[str, Any], good: str, bad: str) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    grammar = StructuredOutputManager(tokenizer, tokenizer.vocab_size).compile(StructuredOutputsParams(**after_reasoning(wanted, "</think>")))

    def is_whole(text: str) -> bool:
        matcher, tokens = grammar.deep_copy(), tokenizer.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    for reasoning in ("hm, 1 < 2 and {", ""):
        assert is_whole(f"{reasoning}</think>\n\n{good}") and is_whole(f"{reasoning}</think>{good}")
        assert not is_whole(f"{reasoning}</think>\n\n{bad}") and not is_whole(f"{reasoning}{good}")


def test_a_format_is_not_forced_upon_the_reasoning_that_the_prompt_opens(client: openai.OpenAI, running: Server) -> None:
    thinking = {"chat_template_kwargs": {"thinks": True}}
    choice = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_tokens=5, extra_body={**thinking, **writing("yes")}).choices[0]
    # Five tokens are no reasoning that has ended, in which the answer would be all that can be drawn.
    assert choice.finish_reason == "length" and not choice.message.content
    grammar = {"structured_outputs": {"grammar": 'start: "a"'}, **thinking, "messages": MESSAGES}
    assert running.post("/v1/chat/completions", grammar).status_code == 400
    assert running.post("/v1/chat/completions", {**grammar, "chat_template_kwargs": {}}).json()["choices"][0]["message"]["content"] == "a"


def test_variables_of_the_template_have_defaults_that_a_request_replaces(running: Server) -> None:
    texts = []
    for given in ({}, {"chat_template_kwargs": {"opening": "", "thinks": True}}):
        tokens = running.post("/tokenize", {"messages": MESSAGES, **given}).json()["tokens"]
        texts.append(running.post("/detokenize", {"tokens": tokens}).json()["prompt"])
    assert texts == ["(o)[user] 1+2?[assistant] ", "[user] 1+2?[assistant] <think>\n"]


def test_the_async_client_gets_the_same_calls(running: Server) -> None:
    async def ask() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=API_KEY)
        async with client, client.chat.completions.stream(**ASKED, extra_body=writing(CALLS)) as stream:
            return await stream.get_final_completion()

    calls = asyncio.run(ask()).choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"a": 1, "b": 2}', "{}"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "without 'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "'sub', which is none of the tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "give one"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "'function'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages", "arguments are not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": "no"}]}, "messages", "is not a list"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": n, "parameters": {"$defs": {"x": {"const": n}}}}} for n in "ab"]},
            "tools", "define '$defs/x' differently",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_one_clear_error(running: Server, fields: dict[str, Any], param: str, words: str) -> None:
    response = running.post("/v1/chat/completions", {**ASKED, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tool_call_parser": "xml"}, "tool_call_parser is 'xml'; it must be one of hermes, llama3_json"),
        ({"reasoning_parser": "deep"}, "reasoning_parser is 'deep'; it must be one of qwen3"),
        ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice needs --tool-call-parser; give one of hermes"),
    ],
)
def test_a_parser_that_is_unknown_is_one_line_before_any_work(model: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        ServerSettings(EngineArgs(model=str(model)), **flags).check()
    assert words in str(refused.value)


def test_a_server_without_a_parser_says_so(shared: Server, client: openai.OpenAI) -> None:
    response = shared.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
    assert response.status_code == 400 and "--enable-auto-tool-choice" in response.json()["error"]["message"]


def test_a_template_that_shows_no_tools_is_named_in_the_log_and_in_a_header_and_the_request_is_answered(shared: Server, running: Server) -> None:
    forced = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 1, "max_tokens": 200}
    for _ in range(2):
        answer = shared.post("/v1/chat/completions", {**forced, "x": 1})
        assert answer.json()["choices"][0]["message"]["tool_calls"]
        assert answer.headers["x-tandem-warning"] == "the chat template does not show the tools to the model; ignored: unknown field 'x'"
    says = "writes the same text with the 2 tools and without, so that the model does not see them; give --chat-template one that writes 'tools'"
    assert shared.log.read_text().count(says) == 1
    for other in ({**forced, "tool_choice": "none"}, {"messages": MESSAGES, "max_tokens": 1}):
        assert "x-tandem-warning" not in shared.post("/v1/chat/completions", other).headers
    shown = running.post("/v1/chat/completions", {**forced, "model": "tiny"}, headers={"Authorization": f"Bearer {API_KEY}"})
    assert shown.status_code == 200 and "x-tandem-warning" not in shown.headers and says not in running.log.read_text()
