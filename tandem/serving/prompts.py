"""Converts a request's body to token ids and sampling parameters."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tandem.engine.processing.truncation import truncate_prompt
from tandem.serving.errors import invalid
from tandem.serving.limits import Limits
from tandem.serving.protocol import ChatCompletionRequest, ChatMessage, SamplingFields
from tandem.serving.text_encoder import INLINE_CHARACTERS, TextEncoder
from tandem.text.chat import ChatTemplate
from tandem.types import UserError

_MAX_GRAMMAR_BYTES = 2**17
"""The most bytes of ``structured_outputs`` as JSON: the engine compiles a grammar between two steps."""
_MAX_CHOICES = 4096
_MANY_MESSAGES = 64
"""Messages above which a conversation is rendered beside the event loop."""


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

    async def chat_prompt(
        self, template: ChatTemplate, messages: list[ChatMessage], add_generation_prompt: bool, variables: dict[str, Any] | None
    ) -> list[int]:
        """Returns the token ids of a conversation. Raises ``ApiError`` for what the template or this server cannot read."""
        plain = [{**message.model_dump(exclude_unset=True), "content": _text(message, i)} for i, message in enumerate(messages)]
        reserved = {"messages", "add_generation_prompt", "tools", "self"} & set(variables or {})
        if reserved:
            raise invalid(f"'chat_template_kwargs' has {sorted(reserved)[0]!r}, which is a field of the request", "chat_template_kwargs")

        def render() -> str:
            return template.render(plain, add_generation_prompt=add_generation_prompt, **(variables or {}))

        is_long = len(plain) > _MANY_MESSAGES or sum(len(message["content"] or "") for message in plain) > INLINE_CHARACTERS
        try:
            text = await asyncio.to_thread(render) if is_long else render()
        except UserError as error:
            raise invalid(str(error), "messages") from None
        return await self.encode(text, add_special_tokens=False, param="messages")


def _text(message: ChatMessage, number: int) -> str | None:
    if message.content is None or isinstance(message.content, str):
        return message.content
    parts = []
    for part in message.content:
        text = part.get("text", part.get("refusal"))
        if part.get("type") not in ("text", "refusal") or not isinstance(text, str):
            raise invalid(f"messages[{number}] has a part of type {str(part.get('type'))[:40]!r}; only text is read", "messages")
        parts.append(text)
    return "\n".join(parts)


def response_format(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """OpenAI's ``response_format`` as ``structured_outputs``."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return body.structured_outputs
    if body.structured_outputs is not None:
        raise invalid("'response_format' and 'structured_outputs' are both given; give one", "response_format")
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise invalid("'response_format' has no json_schema.schema; give the schema that the answer must match", "response_format")
    return {"json": wanted.json_schema.json_schema}
