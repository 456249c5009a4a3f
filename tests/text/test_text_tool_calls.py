"""Tool calls as models write them, in the formats that vLLM documents."""

import json
import random

import pytest

from tandem.text.tool_calls import ToolCall, content_before_calls, parse_tool_calls

CALL = ToolCall("add", {"a": 1, "b": [2, "x"]})


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", 'I compute.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2, \\"x\\"]}"}'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}'),
        ("llama3_json", '<|python_tag|>{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}'),
        ("pythonic", '[add(a=1, b=[2, "x"])]'),
    ],
)
def test_a_call_is_read_in_each_format(parser, text):
    assert parse_tool_calls(parser, text) == [CALL]


def test_several_calls_are_read_in_order():
    names = {
        "hermes": '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>', "llama3_json": '{"name": "a"}; {"name": "b"}',
        "mistral": '[TOOL_CALLS][{"name": "a", "id": "123456789"}, {"name": "b"}]', "pythonic": "[a(), b()]",
    }  # fmt: skip
    for parser, text in names.items():
        assert [call.name for call in parse_tool_calls(parser, text)] == ["a", "b"], parser
    assert parse_tool_calls("mistral", names["mistral"])[0].id == "123456789"
    assert [c.name for c in parse_tool_calls("mistral", '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}')] == ["a", "b"]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_an_answer_has_no_calls(parser):
    for text in ("", "It is 42.", "[1, 2]" if parser == "pythonic" else "[]", "a < b > c"):
        assert parse_tool_calls(parser, text) == []


@pytest.mark.parametrize(
    ("parser", "text", "problem"),
    [
        ("hermes", "<tool_call>{oh</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "'name' and 'arguments'"),
        ("hermes", '<tool_call>{"name": "a", "arguments": 3}</tool_call>', "not an object"),
        ("llama3_json", '{"name": "a"', "not JSON"),
        ("mistral", "[TOOL_CALLS] what", "not JSON"),
        ("pythonic", "[add(a=1", "Python's syntax"),
        ("pythonic", "[add(1)]", "arguments need their names"),
        ("pythonic", "[add(a=b)]", "not a plain value"),
        ("pythonic", "[add(a=b'x')]", "not a JSON value"),
        ("pythonic", "[add(a=1e999)]", "not a JSON value"),
        ("pythonic", "[add(a=" + "[" * 90 + "]" * 90 + ")()]", "arguments need their names"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "not a JSON value"),
        ("hermes", '<tool_call>{"name": "a", "arguments": ' + '{"x":' * 940 + "1" + "}" * 941 + "</tool_call>", "not a"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("pythonic", "[add(a=__import__('os').system('true'))]", "not a plain value"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(parser, text, problem):
    (call,) = parse_tool_calls(parser, text)
    assert problem in call.problem


def test_arguments_are_json_values_and_an_identifier_is_one_that_templates_accept():
    (call,) = parse_tool_calls("pythonic", "[tools.add(a=(1, 2), b={3: True}, c=None)]")
    assert call == ToolCall("tools.add", {"a": [1, 2], "b": {"3": True}, "c": None})
    for own, kept in (("abc123XYZ", "abc123XYZ"), ("x", ""), ("<|im_end|", ""), (7, "")):
        (call,) = parse_tool_calls("hermes", "<tool_call>" + json.dumps({"name": "a", "id": own}) + "</tool_call>")
        assert call.id == kept and not call.problem


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_nothing_that_a_model_writes_raises(parser):
    draw = random.Random(0)
    pieces = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '"name"', '"a"', "a(", "lambda:", "\ud800", *"{}[]:)=1,;\x00\\\n'é"]
    for _ in range(3000):
        text = draw.choice(("", "[", "{", "<tool_call>", "[TOOL_CALLS]")) + "".join(draw.choice(pieces) for _ in range(draw.randint(0, 12)))
        for call in parse_tool_calls(parser, text):
            json.dumps(dict(call.arguments), allow_nan=False)


def test_the_text_before_a_call_is_kept():
    assert content_before_calls("hermes", 'First.\n<tool_call>{"name": "a"}</tool_call>') == "First."
    assert content_before_calls("pythonic", "[a()]") == ""
