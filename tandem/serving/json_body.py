"""Parses the JSON bodies of requests, beside the event loop where they are large, and checks what needs no knowledge of their fields."""

import asyncio
import json
import re
from typing import Any

from starlette.types import Scope

from tandem.serving.errors import ApiError, invalid
from tandem.serving.limits import Limits

MAX_DEPTH = 128
"""Lists and objects within each other. Python's own limit depends on the depth of the stack."""
PARSED = "tandem.json"
"""The key of a request's scope under which its parsed body is."""
_LARGE_BYTES = 2**16
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_IS_JSON = re.compile(rb"application/(?:[^;\s]+\+)?json\s*(?:;|$)", re.IGNORECASE)


class BodyParser:
    """Parses large bodies one at a time in a thread: the parser takes as much memory as several bodies, and the interpreter while it runs."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(1)

    async def parse(self, scope: Scope, body: bytes, limits: Limits | None) -> None:
        """Parses a body that says it is JSON into ``scope``, for ``ParsedRequest``. ``limits``: those of a prompt, ``None`` for other requests.
        Raises ``ApiError``, with one line, for everything that is not JSON or exceeds them."""
        kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if not body or not _IS_JSON.match(kind):
            return
        if len(body) <= _LARGE_BYTES:
            scope[PARSED] = _parse(body, limits)
            return
        async with self._large:
            scope[PARSED] = await asyncio.to_thread(_parse, body, limits)


def _parse(body: bytes, limits: Limits | None) -> Any:
    try:
        value = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _ESCAPED_SURROGATE.search(body):
        _check_unicode(value)
    if limits is not None and isinstance(value, dict):
        _check_counts(value, limits)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _too_deep() -> ApiError:
    return invalid(f"the body has lists or objects nested more than {MAX_DEPTH} deep")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _check_unicode(value: Any) -> None:
    """Raises ``ApiError`` for a string with half of a surrogate pair, which JSON can spell and no text can have."""
    fields = value.items() if isinstance(value, dict) else [(None, value)]
    for name, content in fields:
        try:
            json.dumps([name, content], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            try:
                where = f"'{str(name).encode() and name}'" if name is not None else "the body"
            except UnicodeEncodeError:
                name, where = None, "the name of a field"
            raise invalid(f"{where} has a lone surrogate (\\u{code:04x}), which is no character; remove it", name) from None


def _check_counts(body: dict[str, Any], limits: Limits) -> None:
    """Raises ``ApiError`` for more token ids or prompts than can be served, before any of them is validated."""
    sampling = body.get("sampling_params")
    is_truncated = any(isinstance(part, dict) and part.get("truncate_prompt_tokens") is not None for part in (body, sampling))
    for name in ("prompt", "prompt_token_ids", "tokens", "input", "text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"):
        given = body.get(name)
        # A list of objects is a conversation.
        if not isinstance(given, list) or not given or isinstance(given[0], dict):
            continue
        if isinstance(given[0], (str, list)):
            limits.check_prompts(len(given))
        elif not is_truncated:
            limits.check_tokens(len(given), name)
        for entry in given if isinstance(given[0], list) and not is_truncated else ():
            if isinstance(entry, list):
                limits.check_tokens(len(entry), name)
    bias = body.get("logit_bias") if not isinstance(sampling, dict) else sampling.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > limits.vocab_size:
        raise invalid(f"'logit_bias' names {len(bias)} tokens; the vocabulary has {limits.vocab_size}", "logit_bias")
