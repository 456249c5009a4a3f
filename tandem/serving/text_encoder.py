"""Encodes the texts of requests without delaying the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from tandem.serving.errors import invalid, overloaded
from tandem.serving.sessions import while_connected
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

INLINE_CHARACTERS = 4096
"""Texts up to this length are encoded at once: within 2 ms, whatever they are."""
_LONG_CHARACTERS = 2**17
_MAX_WAITING_CHARACTERS = 2**26

T = TypeVar("T")


class TextEncoder:
    """Encodes texts in two threads, in which the tokenizer releases the interpreter. One thread takes texts of up to 128 Ki characters, the other longer
    ones, so that at most two are encoded at once and a short one does not wait for a long one. More than 64 Mi waiting characters are refused."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, thread_name_prefix="short texts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long texts")
        self._waiting = 0

    async def encode(self, request: Request, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Returns the token ids of ``text``, the field ``param`` of ``request``. Raises ``ApiError`` if it has none or too many texts wait, and
        ``ClientLeft``."""
        try:
            if len(text) <= INLINE_CHARACTERS:
                return self._tokenizer.encode(text, add_special_tokens)
            if self._waiting + len(text) > _MAX_WAITING_CHARACTERS and self._waiting:
                raise overloaded("too many long texts wait to be encoded; try again")
            self._waiting += len(text)
            try:
                threads = self._short if len(text) <= _LONG_CHARACTERS else self._long
                return await while_connected(request, _in(threads, self._tokenizer.encode, text, add_special_tokens))
            finally:
                self._waiting -= len(text)
        except UserError as error:
            raise invalid(str(error), param) from None


async def _in(threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
