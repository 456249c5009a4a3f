"""Chat templates: messages to the text that a model was trained to read. Needs jinja2, an optional extra."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tandem.text.bounded_jinja import bounded_environment
from tandem.text.generation_marks import NO_MARKS, generation_extension
from tandem.types import EndlessTemplate, UserError
from tandem.types.input_file import MOST_JSON_BYTES, read_input, read_json_object

TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_USER = {"role": "user", "content": "Hello."}
_PROBES = ([{"role": "system", "content": "You help."}, _USER], [_USER])
"""Conversations by which it is told whether a template shows tools: some show them in the system's message alone, others refuse one."""
_MOST_SOURCE = 2**18
"""Characters of a template: the longest of known models have some 30,000."""
_MOST_SAID = 1000
"""Characters of the message with which a template refuses a conversation."""
_MOST_LAYOUT = 256
"""Characters of the layout of a date."""
_MOST_JUDGED = 256
"""Sets of tools of which a template keeps whether it shows them."""


def apply_chat_template(
    folder: str | Path,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of ``messages`` by the template of the tokenizer in ``folder``, or by ``template``, as ``ChatTemplate`` gives
    it. Warns of ``tools`` that the template does not show."""
    compiled = ChatTemplate.from_folder(folder, with_tools=bool(tools), source=template)
    text = compiled.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
    if compiled.ignores_tools(tools or (), **variables):
        warnings.warn(compiled.without_tools(len(tools or ())), stacklevel=2)
    return text


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template. ``tokens``: the special tokens that it may write, by their names. ``has_generation``: it says with
    ``{% generation %}`` what the assistant writes."""

    template: Any
    tokens: Mapping[str, Any]
    folder: Path
    has_generation: bool = False
    _ignored: dict[bytes, bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_folder(
        cls, folder: str | Path, with_tools: bool = False, source: str | None = None, *, marks: tuple[str, str] = NO_MARKS, knows_today: bool = True
    ) -> "ChatTemplate":
        """The template of the tokenizer in ``folder``, or ``source`` with its tokens. ``marks``: written around what stands between
        ``{% generation %}`` and ``{% endgeneration %}``. ``knows_today``: the template can ask for the date. Raises ``UserError``
        without jinja2, or without a template."""
        return _compile(Path(folder), with_tools, source, marks, knows_today)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of ``messages``, each with ``role`` and ``content``. ``variables`` reach the template
        (``enable_thinking=False``). The result is encoded without adding special tokens: the template writes them.
        Raises ``UserError`` where the template refuses, and its ``EndlessTemplate`` where it computes for too long."""
        known = {"tools": tools, "documents": None, **self.tokens, **variables}
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            with self.template.environment.bounded():
                text: str = self.template.render(known)
        except Exception as error:  # A template can fail in every way that Python can.
            kind = EndlessTemplate if isinstance(error, EndlessTemplate) else UserError
            raise kind(f"the chat template of '{self.folder}' refuses these messages: {_first_line(error)}") from None
        return text

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Returns a context in which the texts that this thread renders have together at most ``seconds`` of processor time, after which ``render`` raises
        ``EndlessTemplate``."""
        context: AbstractContextManager[None] = self.template.environment.bounded(seconds)
        return context

    def ignores_tools(self, tools: Sequence[Mapping[str, Any]], **variables: Any) -> bool:
        """Returns whether the template, with ``variables``, writes neutral conversations with ``tools`` as without. The answer is about the template: it
        does not depend on the messages that come with the tools. Raises ``EndlessTemplate``."""
        if not tools:
            return False
        key = hashlib.sha256(repr((tools, variables)).encode()).digest()
        if key not in self._ignored:
            if len(self._ignored) >= _MOST_JUDGED:
                self._ignored.clear()
            pairs = [(self._probe(probe, tools, variables), self._probe(probe, None, variables)) for probe in _PROBES]
            # One that refuses a conversation both with tools and without cannot be judged by it.
            judged = [pair for pair in pairs if pair != (None, None)]
            self._ignored[key] = bool(judged) and all(shown == plain for shown, plain in judged)
        return self._ignored[key]

    def _probe(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> str | None:
        """Returns the text of ``messages``, or ``None`` if the template refuses them."""
        try:
            return self.render(messages, **{**variables, "tools": tools, "add_generation_prompt": True})
        except EndlessTemplate:
            raise
        except UserError:
            return None

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises ``UserError`` if the template does not show ``tools``."""
        if self.ignores_tools(tools):
            raise UserError(f"{self.without_tools(len(tools))}; put a template that writes 'tools' there, or leave the tools out")

    def without_tools(self, count: int) -> str:
        """Returns that the model does not see the ``count`` tools that came with messages."""
        which = "the tool" if count == 1 else f"the {count} tools"
        return f"the chat template of '{self.folder}' writes the same text with {which} and without, so that the model does not see them"


def _compile(folder: Path, with_tools: bool, source: str | None, marks: tuple[str, str], knows_today: bool) -> ChatTemplate:
    try:
        import jinja2

        environment = bounded_environment(["jinja2.ext.loopcontrols", generation_extension(marks)], {"tojson": _to_json})
    except ImportError:
        raise UserError("chat templates need jinja2, which is not installed; pip install 'tandem-rl[chat]'") from None

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(layout: str) -> str:
        if len(layout) > _MOST_LAYOUT:
            refuse(f"the layout of a date has {len(layout):,} characters in it")
        return datetime.now().strftime(layout)

    settings = tokenizer_settings(folder)
    if source is None:
        source = template_source(folder, with_tools)
    environment.globals["raise_exception"] = refuse
    if knows_today:
        environment.globals["strftime_now"] = strftime_now
    tokens = {name: _content(settings[name]) for name in TOKEN_NAMES if settings.get(name) is not None}
    if len(source) > _MOST_SOURCE:
        size = f"{len(source):,} characters; at most {_MOST_SOURCE:,} are read"
        raise UserError(f"the chat template of '{folder}' has {size}: save the tokenizer again, or shorten it")
    try:
        template = environment.from_string(source)
        has_generation = environment.parse(source).find(jinja2.nodes.ExtensionAttribute) is not None
        return ChatTemplate(template, tokens, folder, has_generation)
    except Exception as error:  # Python's parser reads what jinja2 makes of a template, and refuses it in ways of its own.
        raise UserError(f"the chat template of '{folder}' is broken: {_first_line(error)}; save the tokenizer again, or correct the template") from None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns what ``tokenizer_config.json`` has. Raises ``UserError``."""
    path = folder / "tokenizer_config.json"
    try:
        return read_json_object(path, "save the tokenizer again")
    except FileNotFoundError as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None


def template_source(folder: Path, with_tools: bool = False) -> str:
    """The template's text: a file of its own (transformers 5), or a string or named list in the settings (4). Raises ``UserError``
    without one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return read_input(file, MOST_JSON_BYTES, "save the tokenizer again").decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"'{file}' cannot be read: {error}") from None
    template = tokenizer_settings(folder).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
        template = named.get("tool_use", named.get("default")) if with_tools else named.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"the tokenizer in '{folder}' has no chat template; give a plain prompt, or a model trained to chat"
        )
    return template


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line if len(line) <= _MOST_SAID else f"{line[:_MOST_SAID]}..."


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # With the arguments of transformers; jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
