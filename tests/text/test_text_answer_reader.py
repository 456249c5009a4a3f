"""Answers read while they are written: text, reasoning and tool calls in the formats of the models' published chat templates."""

import json
import random
from typing import get_args

import pytest

from tandem.config.multi_turn import ToolCallParser
from tandem.text.answer_events import CallArguments, CallBegun, CallEnded, Content, Reasoning, Unreadable
from tandem.text.answer_reader import REASONING_FORMATS, AnswerReader, arguments_of, list_of_calls
from tandem.text.tool_calls import parse_tool_calls
from tandem.text.tool_formats import TOOL_FORMATS, ToolFormat
from tandem.text.typed_arguments import typed_argument

SCHEMAS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "s": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
}
# What the chat template of a model of each format writes for the calls add(a=1, b=[2, "x"], s="7") and now().
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"], "s": "7"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": [2, "x"], "s": "7"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"], "s": "7"}[TOOL_CALLS]now[ARGS]{}',
    "pythonic": '[add(a=1, b=[2, "x"], s="7"), now()]',
    "llama4_pythonic": '<|python_start|>[add(a=1, b=[2, "x"], s="7"), now()]<|python_end|>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, \"x\"]\n</parameter>\n<parameter=s>\n7\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>[2, \"x\"]</parameter>\n<parameter=s>7</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">[2, "x"]</parameter>\n'
    '<parameter name="s">7</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "glm45": '<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2, "x"]</arg_value>\n'
    "<arg_key>s</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": [2, "x"], "s": "7"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": [2, "x"], "s": "7"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": [2, "x"], "s": "7"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": [2, "x"], "s": "7"}}, {"name": "now", "arguments": {}}]',
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1, "b": [2, "x"], "s": "7"}}, {"name": "now", "arguments": {}}]',
    "olmo3": '<function_calls>\nadd(a=1, b=[2, "x"], s="7")\nnow()\n</function_calls>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": [2, "x"], "s": "7"}},\n'
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "openai": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": [2, "x"], "s": "7"}<|call|>'
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "glm47": '<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>[2, "x"]</arg_value>'
    "<arg_key>s</arg_key><arg_value>7</arg_value></tool_call><tool_call>now</tool_call>",
}  # fmt: skip
WRITTEN["qwen3_xml"] = WRITTEN["qwen3_coder"]
WRITTEN["granite4"] = WRITTEN["hermes"]
TAKES_TEXT_BEFORE = sorted(set(WRITTEN) - {"llama3_json", "pythonic", "llama4_pythonic"})


def folded(events):
    """Returns reasoning, content, and the calls with their names, ids and the text of their arguments."""
    reasoning, content, calls, problems = "", "", [], []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallBegun(name, id):
                calls.append([name, id, ""])
            case CallArguments(text):
                calls[-1][2] += text
            case CallEnded(call):
                problems.append(bool(call.problem))
            case Unreadable(written, _):
                content += written
    return reasoning, content, calls, problems


def in_pieces(reader, text, draw):
    events, at = [], 0
    while at < len(text):
        size = draw.choice((1, 1, 2, 3, 7, 20))
        events += reader.push(text[at : at + size])
        at += size
    return [*events, *reader.finish()]


def test_every_format_has_an_example():
    assert set(WRITTEN) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_calls_are_read_in_each_format(name):
    _, content, calls, problems = folded(AnswerReader(TOOL_FORMATS[name], schemas=SCHEMAS).read(WRITTEN[name] + "\n"))
    assert [(each[0], json.loads(each[2])) for each in calls] == [("add", {"a": 1, "b": [2, "x"], "s": "7"}), ("now", {})]
    assert content == "" and problems == [False, False]
    assert [each[1] for each in calls] == (["functions.add:0", "functions.now:1"] if name == "kimi_k2" else ["", ""])


@pytest.mark.parametrize("name", get_args(ToolCallParser))
def test_calls_of_episodes_are_read_in_each_of_their_formats(name):
    calls = parse_tool_calls(name, WRITTEN[name])
    assert [(call.name, call.arguments, call.problem) for call in calls] == [("add", {"a": 1, "b": [2, "x"], "s": "7"}, ""), ("now", {}, "")]


@pytest.mark.parametrize("name", TAKES_TEXT_BEFORE)
def test_text_before_calls_is_content(name):
    reader = AnswerReader(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], schemas=SCHEMAS)
    reasoning, content, calls, _ = folded(reader.read(f"<think>\nI add.\n</think>\n\nLet me see.\n\n{WRITTEN[name]}"))
    assert (reasoning, content, len(calls)) == ("I add.", "Let me see.", 2)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_is_read_does_not_depend_on_how_the_text_is_cut(name):
    draw = random.Random(0)
    text = WRITTEN[name]
    pieces = ["<think>", "</think>", *TOOL_FORMATS[name].marks, *'{}[]"\\ \na(),', '{"name": "a", "arguments": {"x": 1']
    for number in range(150):
        if number % 3 == 0:
            written = text[: draw.randint(0, len(text))]
        elif number % 3 == 1:
            at = draw.randint(0, len(text))
            written = text[:at] + draw.choice(pieces) + text[at + draw.randint(0, 4) :]
        else:
            written = "".join(draw.choice(pieces) for _ in range(draw.randint(0, 14)))
        make = lambda: AnswerReader(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], schemas=SCHEMAS)
        assert folded(in_pieces(make(), written, draw)) == folded(make().read(written)), written


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_an_answer_without_calls_is_passed_on_unchanged(name):
    for text in (" \n An answer, a < b, [1, 2] {x}.\n\n", "", "\n", "Say <tool or [TOOL"):
        assert folded(AnswerReader(TOOL_FORMATS[name]).read(text))[:3] == ("", text, [])


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v31", "kimi_k2", "llama3_json"])
def test_arguments_are_passed_on_while_they_are_written(name):
    text = WRITTEN[name]
    reader = AnswerReader(TOOL_FORMATS[name])
    before = folded(reader.push(text[: text.index('"x"') + 2]))
    assert before[2] == [["add", before[2][0][1], '{"a": 1, "b": [2, "x']]


def test_white_space_at_the_edges_of_a_plain_answer_stays_and_held_text_comes_at_the_end():
    reader = AnswerReader(TOOL_FORMATS["hermes"])
    assert reader.push("a <tool_ca") == [Content("a")]
    assert reader.finish() == [Content(" <tool_ca")]


@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "expected"),
    [
        ("qwen3", "assistant\n", "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        ("qwen3", "assistant\n", "yes", ("", "yes")),
        ("qwen3", "<think>\n\n</think>\n\n", "yes", ("", "yes")),
        ("qwen3", "assistant\n<think>\n", "hm</think>yes", ("hm", "yes")),
        ("qwen3", "assistant\n<think>\n", "hm", ("hm", "")),
        ("deepseek_r1", "<｜Assistant｜>", "hm</think>yes", ("hm", "yes")),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "<think>hm</think>yes", ("hm", "yes")),
        ("deepseek_r1", "<｜Assistant｜></think>", "yes", ("", "yes")),
        ("mistral", "[/INST]", "[THINK]hm[/THINK]yes", ("hm", "yes")),
    ],
)
def test_reasoning_ends_at_its_mark_and_begins_where_the_prompt_says(parser, prompt_end, text, expected):
    form = REASONING_FORMATS[parser]
    for cut in range(len(text) + 1):
        reader = AnswerReader(None, form, is_open=form.begins_within(prompt_end))
        assert folded([*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.finish()])[:2] == expected


def test_an_answer_that_is_forced_to_be_calls_is_read():
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]'
    for reader in (AnswerReader(ToolFormat(list_of_calls)), AnswerReader(ToolFormat(list_of_calls))):
        assert folded(in_pieces(reader, text, random.Random(1)))[2] == [["add", "", '{"a": 1}'], ["now", "", "{}"]]
    assert folded(in_pieces(AnswerReader(arguments_of("add")), '{"a": {"b": "}"}}', random.Random(2)))[2] == [["add", "", '{"a": {"b": "}"}}']]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("\n7\n", {"type": "string"}, "7"), ("7", {"type": "integer"}, 7), ("7.5", {"type": "number"}, 7.5), ("True", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"), ("x", {"type": "integer"}, "x"), ("null", {"type": ["string", "null"]}, None),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 7), ("7", None, "7"), ("NaN", {"type": "number"}, "NaN"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}), ("\n\n  x\n\n", {"type": "string"}, "\n  x\n"), ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)  # fmt: skip
def test_arguments_between_marks_have_the_types_of_the_schema(text, schema, value):
    assert typed_argument(text, schema) == value and type(typed_argument(text, schema)) is type(value)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3"])
def test_nothing_is_held_while_long_arguments_are_written(name):
    """What is not held is not read again, however many pieces there are."""
    text = WRITTEN[name].replace('"x"', '"' + "a line of text\\n" * 2000 + '"')
    reader, begun, passed = AnswerReader(TOOL_FORMATS[name]), text.index("a line"), 0
    for at in range(0, text.rindex("a line"), 3):
        events = reader.push(text[at : at + 3])
        assert len(reader._source.text) < 30
        passed += sum(len(event.text) for event in events if isinstance(event, CallArguments))
        assert at <= begun or passed >= at - begun


@pytest.mark.parametrize("number", range(40))
def test_an_answer_in_harmony_is_read_by_its_channels_however_it_is_cut(number):
    answer = (
        "<|channel|>analysis<|message|>The user asks.\n<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis to=browser.search code<|message|>{\"q\": 1}<|call|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|end|>'
        "<|start|>assistant<|channel|>final<|message|>It is 1."
    )
    for tools in (None, TOOL_FORMATS["openai"]):
        reader = AnswerReader(tools, REASONING_FORMATS["openai_gptoss"])
        reasoning, content, calls, problems = folded(in_pieces(reader, answer, random.Random(number)))
        assert reasoning == 'The user asks.\n{"q": 1}' and content == "I look.\nIt is 1."
        assert calls == [["add", "", '{"a": 1}']] and problems == [False]


def test_an_answer_in_harmony_that_is_cut_off_loses_no_text():
    assert folded(AnswerReader(TOOL_FORMATS["openai"]).read("<|channel|>final"))[1] == "<|channel|>final"
    assert folded(AnswerReader(TOOL_FORMATS["openai"]).read('<|channel|>commentary to=functions.add<|message|>{"a": '))[2:] == ([["add", "", '{"a": ']], [True])


def test_a_forced_list_of_calls_is_read_as_one_where_answers_are_in_harmony():
    reader = AnswerReader(ToolFormat(list_of_calls), REASONING_FORMATS["openai_gptoss"])
    assert folded(reader.read('[{"name": "now", "parameters": {}}]'))[2] == [["now", "", "{}"]]


def test_marks_around_the_text_of_an_answer_are_not_part_of_it():
    cohere = REASONING_FORMATS["cohere_command3"]
    text = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes, a < b<|END_RESPONSE|>"
    for tools in (None, TOOL_FORMATS["cohere_command3"]):
        assert folded(AnswerReader(tools, cohere).read(text))[:3] == ("hm", "yes, a < b", [])
    action = f"<|START_THINKING|>hm<|END_THINKING|>{WRITTEN['cohere_command3']}"
    assert [each[0] for each in folded(AnswerReader(TOOL_FORMATS["cohere_command3"], cohere).read(action))[2]] == ["add", "now"]


def test_constants_of_json_are_read_in_calls_of_python():
    calls = folded(AnswerReader(TOOL_FORMATS["olmo3"]).read("<function_calls>add(a=true, b=null, s='[false)')</function_calls>"))[2]
    assert json.loads(calls[0][2]) == {"a": True, "b": None, "s": "[false)"}


@pytest.mark.parametrize("name", ["granite", "cohere_command3"])
def test_a_mark_without_a_list_of_calls_is_text(name):
    start = TOOL_FORMATS[name].marks[0]
    assert folded(AnswerReader(TOOL_FORMATS[name]).read(f"See: {start} none"))[:3] == ("", f"See:{start} none", [])
