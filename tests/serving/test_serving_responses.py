"""``/v1/responses`` and ``/v1/messages`` with the clients of OpenAI and Anthropic. What the model writes is forced by a structured output."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from server_process import Server
from tool_server import ADD, API_KEY, CALLS, NOW, writing

from tandem.serving.response_store import ResponseStore

FUNCTIONS: Any = [{"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in (("add", ADD), ("now", NOW))]
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in (("add", ADD), ("now", NOW))]
TOOLS: Any = [{"name": "add", "input_schema": ADD}, {"name": "now", "description": "the time", "input_schema": NOW}]
TEXT = f"<think>\nI add.\n</think>\n\nLet me see.\n{CALLS}"


@pytest.fixture(scope="module")
def client(running: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=API_KEY, max_retries=0)


@pytest.fixture(scope="module")
def claude(running: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key=API_KEY, max_retries=0)


def count(running: Server, messages: Any, **fields: Any) -> int:
    """Returns the number of tokens of a conversation."""
    answer = running.post("/tokenize", {"messages": messages, **fields})
    return answer.json()["count"]


def test_a_response_has_reasoning_text_and_calls_whole_and_as_a_stream(client: openai.OpenAI, running: Server) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "1+2?", "tools": FUNCTIONS, "max_output_tokens": 300, "extra_body": writing(TEXT)}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        put_together = stream.get_final_response()
    for answer in (whole, put_together):
        reasoning, message, *calls = answer.output
        assert (answer.status, reasoning.content[0].text, answer.output_text, message.status) == ("completed", "I add.", "Let me see.", "completed")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1, "b": 2}), ("now", {})]
        assert len({item.id for item in answer.output}) == 4 and len({call.call_id for call in calls}) == 2
        assert answer.usage.input_tokens == count(running, [{"role": "user", "content": "1+2?"}], tools=CHAT_TOOLS)
        assert answer.usage.output_tokens > answer.usage.output_tokens_details.reasoning_tokens > 0
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len([event for event in events if event.type == "response.function_call_arguments.delta"]) > 5
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item.id for event in done] == [item.id for item in put_together.output]


def test_the_events_of_a_stream_come_in_the_order_of_openais(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="x", stream=True, max_output_tokens=60, extra_body=writing("It is 3.")))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"] and set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is 3."


def test_a_response_continues_an_earlier_one_and_can_be_read_and_deleted(client: openai.OpenAI, running: Server) -> None:
    fields: dict[str, Any] = {"model": "tiny", "tools": FUNCTIONS, "max_output_tokens": 100}
    first = client.responses.create(**fields, input="1+2?", instructions="Be brief.", extra_body=writing(CALLS.partition("\n<tool_call>")[0]))
    (call,) = first.output
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    second = client.responses.create(**fields, input=result, previous_response_id=first.id, extra_body=writing("It is 3."))
    asked = {"id": "x", "type": "function", "function": {"name": "add", "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "", "tool_calls": [asked]}, {"role": "tool", "tool_call_id": "x", "content": "3"},
    ]  # fmt: skip
    assert second.usage is not None and second.usage.input_tokens == count(running, messages, tools=CHAT_TOOLS)
    assert client.responses.retrieve(second.id).output_text == "It is 3." and second.previous_response_id == first.id
    client.responses.delete(first.id)
    for id in (first.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError, match="is not held here"):
            client.responses.create(**fields, input="x", previous_response_id=id)
    kept = client.responses.create(**fields, input="x", store=False, extra_body=writing("no"))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_every_method_of_a_path_is_named_where_another_is_used(running: Server) -> None:
    answer = running.post("/v1/responses/x", {})
    assert answer.status_code == 405 and answer.headers["Allow"] == "DELETE, GET"


def test_a_response_that_is_cut_is_incomplete_and_a_format_is_kept(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="tiny", input="x", max_output_tokens=3, extra_body=writing("It is a long answer."))
    assert cut.status == "incomplete" and cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": ADD, "strict": True}}
    found = json.loads(client.responses.create(model="tiny", input="x", text=form, max_output_tokens=200, extra_body={"seed": 1}).output_text)
    assert set(found) == {"a", "b"}
    named = client.responses.create(model="tiny", input="x", tools=FUNCTIONS, tool_choice={"type": "function", "name": "add"}, max_output_tokens=200)
    assert [item.name for item in named.output if item.type == "function_call"] == ["add"]


def test_a_message_has_thinking_text_and_calls_whole_and_as_a_stream(claude: anthropic.Anthropic, running: Server) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "1+2?"}], "tools": TOOLS}
    answers = [claude.messages.create(**fields, extra_body=writing(TEXT))]
    with claude.messages.stream(**fields, extra_body=writing(TEXT)) as stream:
        events = list(stream)
        answers.append(stream.get_final_message())
    for answer in answers:
        thinking, text, *calls = answer.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "I add.", "Let me see.")
        assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "add", {"a": 1, "b": 2}), ("tool_use", "now", {})]
        assert answer.stop_reason == "tool_use" and answer.usage.output_tokens > 10
        assert answer.usage.input_tokens == claude.messages.count_tokens(model="tiny", messages=fields["messages"], tools=TOOLS).input_tokens
    assert len([event for event in events if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]) > 5


def test_a_conversation_of_anthropic_is_the_chat_that_it_means(claude: anthropic.Anthropic, running: Server) -> None:
    used: Any = {"type": "tool_use", "id": "x", "name": "add", "input": {"a": 1, "b": 2}}
    thought: Any = {"type": "thinking", "thinking": "I add.", "signature": ""}
    messages: Any = [
        {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": [thought, {"type": "text", "text": "So:"}, used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "3"}, {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    function = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}, "id": "x"}
    chat = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "So:", "reasoning_content": "I add.", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "x", "content": "3"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert claude.messages.count_tokens(model="tiny", system="Be brief.", messages=messages).input_tokens == count(running, chat)


def test_why_a_message_ended(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    ended = claude.messages.create(**fields, max_tokens=60, extra_body=writing("It is 3."))
    assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == ("end_turn", None, "It is 3.")
    assert claude.messages.create(**fields, max_tokens=2, extra_body=writing("It is 3.")).stop_reason == "max_tokens"
    stopped = claude.messages.create(**fields, max_tokens=60, stop_sequences=["is"], extra_body=writing("It is 3."))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is")
    forced = claude.messages.create(**fields, max_tokens=200, tools=TOOLS, tool_choice={"type": "tool", "name": "add"})
    assert forced.stop_reason == "tool_use" and set(forced.content[0].input) == {"a", "b"}


def test_errors_have_the_form_of_each_interface(client: openai.OpenAI, claude: anthropic.Anthropic, running: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match=r"'tool_choice\.type' is 'x'"):
        claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice={"type": "x"})  # type: ignore[arg-type, typeddict-item]
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0).messages.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(openai.BadRequestError, match="'web_search' is not supported"):
        client.responses.create(model="tiny", input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="is not read; messages and functions are"):
        client.responses.create(model="tiny", input=[{"type": "computer_call"}])  # type: ignore[list-item, typeddict-item, misc]


def test_the_async_clients_get_the_same(running: Server) -> None:
    async def ask() -> tuple[str, str]:
        ours = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=API_KEY)
        theirs = anthropic.AsyncAnthropic(base_url=running.url, api_key=API_KEY)
        async with ours, theirs, theirs.messages.stream(
            model="tiny", max_tokens=60, messages=[{"role": "user", "content": "x"}], extra_body=writing("It is 3.")
        ) as stream:
            first = "".join([text async for text in stream.text_stream])
            return first, (await ours.responses.create(model="tiny", input="x", extra_body=writing("It is 3."))).output_text

    assert asyncio.run(ask()) == ("It is 3.", "It is 3.")


def test_the_store_of_responses_is_bounded_in_number_and_bytes() -> None:
    store = ResponseStore(most=3, most_bytes=10_000)
    for number in range(4):
        store.put(str(number), [], {"n": number})
    assert store.get("0") is None and store.get("1") is not None
    store.put("4", [], {})
    assert store.get("2") is None and store.get("1") is not None
    store.put("long", [{"content": "x" * 9_970}], {})
    assert [id for id in ("1", "3", "4", "long") if store.get(id)] == ["long"]
    store.put("longer", [{"content": "x" * 10_000}], {})
    assert store.get("longer") is None and store.remove("long") and not store.remove("long")
