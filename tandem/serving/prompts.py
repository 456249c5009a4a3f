"""Converts a request's body to token ids and sampling parameters."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from tandem.engine.processing.truncation import truncate_prompt
from tandem.serving.errors import invalid
from tandem.serving.http_process import say
from tandem.serving.ignored_fields import warn_of
from tandem.serving.limits import Limits
from tandem.serving.protocol import ChatCompletionRequest, ChatMessage, OpenAIFields, SamplingFields
from tandem.serving.text_encoder import INLINE_CHARACTERS, TextEncoder
from tandem.text.chat import ChatTemplate
from tandem.text.continuation import cut_at_mark, mark_end
from tandem.text.messages import plain_calls, plain_text
from tandem.types import EndlessTemplate, UserError

T = TypeVar("T")

_MAX_GRAMMAR_BYTES = 2**17
"""The most bytes of ``structured_outputs`` as JSON: the engine compiles a grammar between two steps."""
_MAX_CHOICES = 4096
_MANY_MESSAGES = 64
"""Messages above which a conversation is rendered beside the event loop."""
_INLINE_SECONDS = 0.02
"""Of processor time, for which a short conversation may be rendered on the event loop; one that takes longer is rendered beside it."""
_warned: set[Path] = set()
"""Folders of whose templates the log says that they show no tools."""


def sampling_params(body: SamplingFields, defaults: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Returns keyword arguments of ``SamplingParams``: the fields that were given, ``more`` where it is not ``None``, and ``defaults`` for the rest."""
    body.check()
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(f"'best_of' is {body.best_of}; it is not supported: ask for n and choose among them", "best_of")
    params = {name: getattr(body, name) for name in SamplingFields.model_fields if name != "best_of"} | more
    if params["logit_bias"] is not None:
        params["logit_bias"] = _logit_bias(params["logit_bias"])
    if params["structured_outputs"] is not None:
        _check_grammar(params["structured_outputs"])
    return {**(defaults or {}), **{name: value for name, value in params.items() if value is not None}}


def _check_grammar(given: dict[str, Any]) -> None:
    choices = given.get("choice")
    if isinstance(choices, list) and len(choices) > _MAX_CHOICES:
        raise invalid(f"'structured_outputs' has {len(choices)} choices; at most {_MAX_CHOICES} are compiled", "structured_outputs")
    size = len(json.dumps(given))
    if size > _MAX_GRAMMAR_BYTES:
        raise invalid(f"'structured_outputs' has {size} bytes; grammars of at most {_MAX_GRAMMAR_BYTES} bytes are compiled", "structured_outputs")


def _logit_bias(given: dict[str, float]) -> list[list[float]]:
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in given):
        wrong = next(token for token in given if not (token.isascii() and token.isdigit() and len(token) < 10))
        raise invalid(f"'logit_bias' names {wrong[:40]!r}; every name must be a token id", "logit_bias")
    return [[int(token), value] for token, value in given.items()]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given. ``variables``: further ones, of the client. ``continues_last``: the prompt ends with the last message, which the model
    continues."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Converts the prompts of one request to token ids, of which there are at most as many as the context has. ``truncate_prompt_tokens`` and
    ``max_tokens`` as in ``truncate_prompt``."""

    encoder: TextEncoder
    limits: Limits
    request: Request
    truncate_prompt_tokens: int | None = None
    max_tokens: int | None = None

    async def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Returns the token ids of ``text``. Raises ``ApiError`` if it has none, or too many for the context: without encoding it where its length
        alone decides."""
        if self.truncate_prompt_tokens is None:
            self.limits.check_text(text, param)
        return self.fitting(await self.encoder.encode(self.request, text, add_special_tokens, param), param)

    def fitting(self, tokens: list[int], param: str = "prompt") -> list[int]:
        """Returns the tokens that are left by a truncation. Raises ``ApiError`` if they do not fit the context."""
        left = truncate_prompt(tokens, self.truncate_prompt_tokens, self.max_tokens, self.limits.max_prompt_tokens)
        self.limits.check_tokens(len(left), param)
        return left

    async def completion_prompts(self, prompt: Any, add_special_tokens: bool) -> list[list[int]]:
        """Returns the prompts of a completion request in any of their forms."""
        listed: Sequence[Any] = prompt if isinstance(prompt, list) else [prompt]
        if not listed:
            raise invalid("'prompt' is empty; give at least one text or token", "prompt")
        if isinstance(listed[0], int):
            return [self.fitting(list(listed))]
        return [await self.encode(entry, add_special_tokens) if isinstance(entry, str) else self.fitting(entry) for entry in listed]

    async def chat_text(self, template: ChatTemplate, chat: Conversation) -> str:
        """Returns the text of a conversation. Raises ``ApiError`` for what the template or this server cannot read."""
        plain: list[Mapping[str, Any]]
        try:
            plain = [_plain(message, i) for i, message in enumerate(chat.messages)]
        except UserError as error:
            raise invalid(str(error), "messages") from None
        if chat.continues_last:
            if chat.add_generation_prompt:
                raise invalid("'continue_final_message' and 'add_generation_prompt' exclude each other; set the second to false", "continue_final_message")
            try:
                plain = mark_end(plain)
            except UserError as error:
                raise invalid(str(error), "continue_final_message") from None
        reserved = {"messages", "add_generation_prompt", "tools", "self"} & set(chat.variables)
        if reserved:
            raise invalid(f"'chat_template_kwargs' has {sorted(reserved)[0]!r}, which is a field of the request", "chat_template_kwargs")

        options = {"add_generation_prompt": chat.add_generation_prompt, **chat.variables}

        def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
            text = template.render(messages, tools=chat.tools or None, **options)
            if template.ignores_tools(chat.tools, **chat.variables):
                # As in vLLM, such requests are answered: many clients send their tools to every model.
                warn_of(self.request, "the chat template does not show the tools to the model")
                if template.folder not in _warned:
                    _warned.add(template.folder)
                    say(f"warning: {template.without_tools(len(chat.tools))}; give --chat-template one that writes 'tools'")
            return text

        def render() -> str:
            try:
                return rendered(plain)
            except EndlessTemplate:
                raise
            except UserError:
                if not any(message.get("tool_calls") for message in plain):
                    raise
                # Some templates, such as DeepSeek's, write the arguments of earlier calls as the text that they are given.
                return rendered([_with_text_arguments(message) for message in plain])

        is_long = len(plain) > _MANY_MESSAGES or sum(len(message["content"] or "") for message in plain) > INLINE_CHARACTERS
        try:
            text = await rendered_beside(template, render, is_long)
            return cut_at_mark(text) if chat.continues_last else text
        except UserError as error:
            raise invalid(str(error), "messages") from None

    async def chat_prompt(self, template: ChatTemplate, chat: Conversation) -> list[int]:
        """Returns the token ids of a conversation. Raises ``ApiError``."""
        return await self.chat_tokens(await self.chat_text(template, chat))

    async def chat_tokens(self, text: str) -> list[int]:
        """Returns the token ids of the ``text`` of a conversation. Raises ``ApiError``."""
        return await self.encode(text, add_special_tokens=False, param="messages")


async def rendered_beside(template: ChatTemplate, render: Callable[[], T], is_long: bool) -> T:
    """Returns what ``render`` makes with ``template``: on the event loop what is soon made, in a thread what takes longer or ``is_long``. Raises
    ``UserError``."""
    if not is_long:
        with contextlib.suppress(EndlessTemplate), template.within(_INLINE_SECONDS):
            return render()
    return await asyncio.to_thread(render)


def _plain(message: ChatMessage, number: int) -> dict[str, Any]:
    """Returns a message as templates read it. Raises ``UserError``."""
    given = message.model_dump(exclude_unset=True)
    plain = {**given, "content": plain_text(message.content, number)}
    if message.role == "developer":
        plain["role"] = "system"
    if given.get("tool_calls"):
        plain["tool_calls"] = plain_calls(given["tool_calls"], number)
    else:
        plain.pop("tool_calls", None)
    if isinstance(given.get("reasoning"), str):
        # The name that templates read.
        plain.setdefault("reasoning_content", given["reasoning"])
    return plain


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def structured_outputs(body: OpenAIFields) -> dict[str, Any] | None:
    """Returns ``structured_outputs``, or one of the fields ``guided_*`` that it has replaced in vLLM. Raises ``ApiError`` for several."""
    given = {kind: value for kind in ("json", "regex", "choice", "grammar") if (value := getattr(body, f"guided_{kind}")) is not None}
    if given and (len(given) > 1 or body.structured_outputs is not None):
        name = f"guided_{next(iter(given))}"
        raise invalid(f"'{name}' and another format of the answer are given; give one", name)
    return given or body.structured_outputs


def response_format(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """OpenAI's ``response_format`` as ``structured_outputs``."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return structured_outputs(body)
    if structured_outputs(body) is not None:
        raise invalid("'response_format' and 'structured_outputs' are both given; give one", "response_format")
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise invalid("'response_format' has no json_schema.schema; give the schema that the answer must match", "response_format")
    return {"json": wanted.json_schema.json_schema}
