"""Converts a request's body to token ids and sampling parameters."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.serving.errors import invalid
from tandem.serving.protocol import ChatCompletionRequest, ChatMessage, SamplingFields
from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

_LONG_TEXT = 20_000
"""Characters above which a text is encoded beside the event loop."""


def sampling_params(body: SamplingFields, **more: Any) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``: the fields that were given, and ``more`` where it is not ``None``."""
    body.check()
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(f"'best_of' is {body.best_of}; it is not supported: ask for n and choose among them", "best_of")
    params = {name: getattr(body, name) for name in SamplingFields.model_fields if name != "best_of"} | more
    if params["logit_bias"] is not None:
        params["logit_bias"] = _logit_bias(params["logit_bias"])
    return {name: value for name, value in params.items() if value is not None}


def _logit_bias(given: dict[str, float]) -> list[list[float]]:
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in given):
        wrong = next(token for token in given if not (token.isascii() and token.isdigit() and len(token) < 10))
        raise invalid(f"'logit_bias' names {wrong[:40]!r}; every name must be a token id", "logit_bias")
    return [[int(token), value] for token, value in given.items()]


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of ``text``. Raises ``ApiError`` where it has none."""
    try:
        if len(text) <= _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    except UserError as error:
        raise invalid(str(error), "prompt") from None


async def completion_prompts(tokenizer: Tokenizer, prompt: Any, add_special_tokens: bool) -> list[list[int]]:
    """Returns the prompts of a completion request in any of their forms."""
    listed: Sequence[Any] = prompt if isinstance(prompt, list) else [prompt]
    if not listed:
        raise invalid("'prompt' is empty; give at least one text or token", "prompt")
    if isinstance(listed[0], int):
        return [list(listed)]
    return [await encode(tokenizer, entry, add_special_tokens) if isinstance(entry, str) else entry for entry in listed]


async def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: list[ChatMessage], add_generation_prompt: bool, variables: dict[str, Any] | None
) -> list[int]:
    """Token ids of a conversation. Raises ``ApiError`` for what the template or this server cannot read."""
    plain = [{**message.model_dump(exclude_unset=True), "content": _text(message, i)} for i, message in enumerate(messages)]
    reserved = {"messages", "add_generation_prompt", "tools", "self"} & set(variables or {})
    if reserved:
        raise invalid(f"'chat_template_kwargs' has {sorted(reserved)[0]!r}, which is a field of the request", "chat_template_kwargs")
    try:
        text = template.render(plain, add_generation_prompt=add_generation_prompt, **(variables or {}))
    except UserError as error:
        raise invalid(str(error), "messages") from None
    return await encode(tokenizer, text, add_special_tokens=False)


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
