"""Chat templates: messages to the text that a model was trained to read. Needs jinja2, an optional extra."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tandem.types import UserError

TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def apply_chat_template(
    folder: str | Path,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of ``messages`` (each with ``role`` and ``content``) by the template of the tokenizer in ``folder``,
    or by ``template``.

    ``variables`` reach the template (``enable_thinking=False``). The result is encoded without adding special tokens:
    the template writes them. Raises ``UserError`` without jinja2, without a template, or where the template refuses.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chat templates need jinja2, which is not installed; pip install 'tandem-rl[chat]'") from None

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    settings = _settings(Path(folder))
    source = _source(Path(folder), settings, with_tools=bool(tools)) if template is None else template
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    tokens = {name: _content(settings[name]) for name in TOKEN_NAMES if settings.get(name) is not None}
    known = {"tools": tools, "documents": None, **tokens, **variables}
    try:
        return environment.from_string(source).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **known
        )
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template of '{folder}' refuses these messages: {error}") from None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None
    return settings


def _source(folder: Path, settings: dict[str, Any], with_tools: bool) -> str:
    """The template's text: a file of its own (transformers 5), or a string or named list in the settings (4)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use", named.get("default")) if with_tools else named.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"the tokenizer in '{folder}' has no chat template; give a plain prompt, or a model trained to chat"
        )
    return template


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
