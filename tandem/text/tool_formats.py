"""How models write tool calls, with vLLM's names of the formats. Each reads the text of an answer while it is written.

The formats are those of the chat templates that the models are published with.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.text.answer_events import CallArguments, CallBegun, CallEnded, Event, Unreadable
from tandem.text.harmony import MARKS, read_harmony
from tandem.text.json_call import JsonCall, json_object, shown
from tandem.text.json_lists import json_list
from tandem.text.nesting import Nesting
from tandem.text.pieces import Pieces, Steps
from tandem.text.typed_arguments import typed_argument
from tandem.text.written_calls import ToolCall, from_python

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool, by its name."""
_PYTHON_TAG = "<|python_tag|>"
_PYTHON_LIST = re.compile(r"\s*\[\s*[^\W\d][\w.]*\s*\(")
_PYTHON_LIST_BEGUN = re.compile(r"\s*(?:\[\s*(?:[^\W\d][\w.]*\s*)?)?\Z")
_LONGEST_NAME = 256
_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``read``: the steps of a reader of ``Pieces``, given the schemas of the tools. ``marks``: what its calls begin and end with, which special tokens may
    be. ``short_ids``: its templates take names of calls of nine letters or digits only."""

    read: Callable[[Pieces, Schemas], Steps[None]]
    marks: Sequence[str] = ()
    short_ids: bool = False


def _hermes(source: Pieces, schemas: Schemas) -> Steps[None]:
    mark = yield from source.pass_until("<tool_call>")
    while mark:
        call = JsonCall()
        yield from source.feed_until(call.push, "</tool_call>")
        yield from shown(call.finish(), "<tool_call>", "</tool_call>")
        mark = yield from source.pass_until("<tool_call>", is_trimmed=True)


def _llama3_json(source: Pieces, schemas: Schemas) -> Steps[None]:
    has_tag = yield from source.begins_with(_PYTHON_TAG)
    is_call = False
    while (yield from source.begins_with("{", is_taken=False)):
        is_call = True
        yield from json_object(source)
        yield from source.begins_with(";")
    yield from source.pass_until(is_trimmed=is_call or has_tag)


def _mistral(source: Pieces, schemas: Schemas) -> Steps[None]:
    start = "[TOOL_CALLS]"
    mark = yield from source.pass_until(start)
    while mark:
        if (yield from source.begins_with("[")):
            while (yield from source.begins_with("{", is_taken=False)):
                yield from json_object(source)
                yield from source.begins_with(",")
            if not (yield from source.begins_with("]")):
                yield from _rest_of_call(source, start)
        elif (yield from source.begins_with("{", is_taken=False)):
            yield from json_object(source)
        else:
            head, args = yield from source.until("[ARGS]", "{", start)
            name, _, id = (part.strip() for part in head.partition("[CALL_ID]"))
            if args == "{":
                source.text = args + source.text
            if args in ("", start) or not _NAME.fullmatch(name):
                yield Unreadable(start + head, ToolCall(problem="the calls are not JSON"))
                if args == start:
                    continue
            elif (yield from source.begins_with("{", is_taken=False)):
                yield from json_object(source, JsonCall(name, id))
            else:
                yield from _rest_of_call(source, start)
        mark = yield from source.pass_until(start, is_trimmed=True)


def _rest_of_call(source: Pieces, start: str) -> Steps[None]:
    """Reads what is no call, up to the next mark ``start``."""
    text, mark = yield from source.until(start)
    source.text = mark + source.text
    if text.strip():
        yield Unreadable(text, ToolCall(problem="the calls are not JSON"))


def _pythonic(source: Pieces, schemas: Schemas, start: str = _PYTHON_TAG, end: str = "") -> Steps[None]:
    has_tag = yield from source.begins_with(start)
    while not _PYTHON_LIST.match(source.text):
        if source.is_over or not _PYTHON_LIST_BEGUN.match(source.text) or len(source.text) > _LONGEST_NAME:
            yield from source.pass_until(is_trimmed=has_tag)
            return
        yield None
    yield from source.begins_with("[")
    while (yield from _python_call(source)):
        pass
    if end:
        yield from source.begins_with(end)
    yield from source.pass_until(is_trimmed=True)


def _python_call(source: Pieces) -> Steps[bool]:
    """Reads a call of a list, and returns whether another follows."""
    written, follows = "", ""
    while follows not in (",", "]"):
        written += yield from source.nested(_python_nesting())
        yield from source.skip_space()
        if not source.text:
            break
        follows = source.text[0]
    source.drop(1)
    yield from _read_call(written)
    return follows == ","


def _read_call(written: str) -> Steps[None]:
    call = from_python(written)
    if call.problem:
        yield Unreadable(written, call)
    else:
        yield CallBegun(call.name)
        yield CallArguments(json.dumps(dict(call.arguments), ensure_ascii=False))
        yield CallEnded(call)


def _python_nesting() -> Nesting:
    return Nesting("\"'", ("([{", ")]}"))


def _olmo3(source: Pieces, schemas: Schemas) -> Steps[None]:
    start, end = "<function_calls>", "</function_calls>"
    mark = yield from source.pass_until(start)
    while mark:
        while not (yield from source.begins_with(end)):
            written = yield from source.nested(_python_nesting())
            if not written.strip():
                break
            yield from _read_call(written)
        mark = yield from source.pass_until(start, is_trimmed=True)


@dataclass(slots=True)
class _Parameters:
    """Writes the arguments of a call of the tool ``name`` one after the other."""

    name: str
    schemas: Schemas
    arguments: dict[str, Any]

    def add(self, key: str, text: str) -> Event:
        properties = self.schemas.get(self.name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        opening = ", " if self.arguments else "{"
        self.arguments[key] = typed_argument(text, schema)
        return CallArguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {json.dumps(self.arguments[key], ensure_ascii=False)}")

    def end(self, is_whole: bool) -> Iterator[Event]:
        if is_whole:
            yield CallArguments("}" if self.arguments else "{}")
        yield CallEnded(ToolCall(self.name, self.arguments, "" if is_whole else "the call has no end"))


def _tagged(tag: str, opening: tuple[str, str], parameter: tuple[str, str], closing: str) -> ToolFormat:
    """The format of calls within ``<tag>``. ``opening``: before and after the name of a tool. ``parameter``: the same of a parameter."""
    start, end = f"<{tag}>", f"</{tag}>"

    def read(source: Pieces, schemas: Schemas) -> Steps[None]:
        # Models leave out the outer mark now and then.
        mark = yield from source.pass_until(start, opening[0])
        while mark:
            if mark == start and not (yield from source.begins_with(opening[0])):
                written, mark = yield from source.until(end)
                yield Unreadable(start + written + mark, ToolCall(problem=f"the call does not begin with {opening[0]}"))
            else:
                is_whole = True
                while is_whole:
                    is_whole = yield from one(source, schemas)
                    if not is_whole or not (yield from source.begins_with(opening[0])):
                        break
                yield from source.begins_with(end)
            mark = yield from source.pass_until(start, opening[0], is_trimmed=True)

    def one(source: Pieces, schemas: Schemas) -> Steps[bool]:
        name, mark = yield from source.until(opening[1])
        if not mark:
            yield Unreadable(opening[0] + name, ToolCall(problem="the call has no end"))
            return False
        yield CallBegun(name)
        parameters = _Parameters(name, schemas, {})
        while True:
            _, mark = yield from source.until(parameter[0], closing)
            if mark != parameter[0]:
                yield from parameters.end(bool(mark))
                return bool(mark)
            key, _ = yield from source.until(parameter[1])
            value, mark = yield from source.until("</parameter>")
            if mark:
                yield parameters.add(key, value)

    return ToolFormat(read, (start, end))


def _glm45(source: Pieces, schemas: Schemas) -> Steps[None]:
    mark = yield from source.pass_until("<tool_call>")
    while mark:
        name, mark = yield from source.until("<arg_key>", "</tool_call>")
        if not mark:
            yield Unreadable("<tool_call>" + name, ToolCall(problem="the call has no end"))
            return
        parameters = _Parameters(name.strip(), schemas, {})
        yield CallBegun(parameters.name)
        while mark == "<arg_key>":
            key, _ = yield from source.until("</arg_key>")
            yield from source.begins_with("<arg_value>")
            value, is_whole = yield from source.until("</arg_value>")
            if is_whole:
                yield parameters.add(key, value)
            _, mark = yield from source.until("<arg_key>", "</tool_call>")
        yield from parameters.end(bool(mark))
        mark = yield from source.pass_until("<tool_call>", is_trimmed=True)


def _sections(outer: tuple[str, str], begin: str, separator: str, end: str, name_line: bool = False) -> ToolFormat:
    """The format of calls within the marks ``outer``, each of which has a head before ``separator``. The head names the tool; with ``name_line`` the line
    after it does, and a Markdown block has the arguments."""

    def read(source: Pieces, schemas: Schemas) -> Steps[None]:
        mark = yield from source.pass_until(outer[0], begin)
        while mark:
            if mark == begin or (yield from source.begins_with(begin)):
                head, mark = yield from source.until(separator)
                if name_line:
                    head, mark = yield from source.until("\n")
                    yield from source.begins_with("```json")
                if mark:
                    call = JsonCall(*_head_name(head.strip()))
                    yield from source.feed_until(call.push, end)
                    yield from shown(call.finish(), f"{begin}{head}{separator}", end)
                else:
                    yield Unreadable(begin + head, ToolCall(problem="the call has no end"))
            yield from source.begins_with(outer[1])
            mark = yield from source.pass_until(outer[0], begin, is_trimmed=True)

    return ToolFormat(read, (*outer, begin, separator, end))


def _head_name(head: str) -> tuple[str, str]:
    """Returns the name of a tool and of the call: Kimi writes ``functions.NAME:NUMBER``, and its template takes that as the name of the call."""
    match = re.fullmatch(r"functions\.(.+):\d+", head)
    return (match[1], head) if match else (head or "?", "")


_KIMI = (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_DEEPSEEK = (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_QWEN_XML = (("<function=", ">"), ("<parameter=", ">"), "</function>")
_HERMES_FORMAT = ToolFormat(_hermes, ("<tool_call>", "</tool_call>"))
_GLM_FORMAT = ToolFormat(_glm45, ("<tool_call>", "</tool_call>"))
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES_FORMAT,
    "llama3_json": ToolFormat(_llama3_json, (_PYTHON_TAG,)),
    "mistral": ToolFormat(_mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), short_ids=True),
    "pythonic": ToolFormat(_pythonic, (_PYTHON_TAG,)),
    "llama4_pythonic": ToolFormat(
        lambda source, schemas: _pythonic(source, schemas, "<|python_start|>", "<|python_end|>"), ("<|python_start|>", "<|python_end|>")
    ),
    "qwen3_coder": _tagged("tool_call", *_QWEN_XML),
    "qwen3_xml": _tagged("tool_call", *_QWEN_XML),
    "seed_oss": _tagged("seed:tool_call", *_QWEN_XML),
    "minimax_m2": _tagged("minimax:tool_call", ('<invoke name="', '">'), ('<parameter name="', '">'), "</invoke>"),
    "glm45": _GLM_FORMAT,
    "deepseek_v3": _sections(*_DEEPSEEK, name_line=True),
    "deepseek_v31": _sections(*_DEEPSEEK),
    "kimi_k2": _sections(*_KIMI),
    "glm47": _GLM_FORMAT,
    "granite": ToolFormat(json_list("<|tool_call|>", "<tool_call>"), ("<|tool_call|>", "<tool_call>")),
    "granite4": _HERMES_FORMAT,
    "phi4_mini_json": ToolFormat(json_list("functools[")),
    "olmo3": ToolFormat(_olmo3, ("<function_calls>", "</function_calls>")),
    "cohere_command3": ToolFormat(json_list("<|START_ACTION|>", end="<|END_ACTION|>"), ("<|START_ACTION|>", "<|END_ACTION|>")),
    "openai": ToolFormat(read_harmony, MARKS),
}
