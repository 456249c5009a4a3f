"""Encodes the texts of requests without delaying the event loop."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request

from tandem.serving.errors import invalid, overloaded
from tandem.serving.sessions import while_connected
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

INLINE_CHARACTERS = 4096
"""Texts up to this length are encoded at once: within 2 ms, whatever they are."""
_LONG_CHARACTERS = 2**17
_MAX_WAITING_CHARACTERS = 2**26


class TextEncoder:
    """Encodes texts beside the event loop, in threads in which the tokenizer releases the interpreter: at most two at once, one of up to 128 Ki
    characters and one longer text, so that a short one does not wait for a long one. More than 64 Mi waiting characters are refused.

    Each text has a thread of its own: the library keeps a cache of words for each thread, tens of MiB after an unusual text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short, self._long = asyncio.Semaphore(1), asyncio.Semaphore(1)
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
                return await while_connected(request, self._encode(text, add_special_tokens))
            finally:
                self._waiting -= len(text)
        except UserError as error:
            raise invalid(str(error), param) from None

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        turn = self._short if len(text) <= _LONG_CHARACTERS else self._long
        await turn.acquire()
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="long text")
        encoding = thread.submit(self._tokenizer.encode, text, add_special_tokens)
        thread.shutdown(wait=False)

        def ended(_: object) -> None:
            # The loop is closed if the server has stopped meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(turn.release)

        # Also where the client has left: the thread cannot be stopped.
        encoding.add_done_callback(ended)
        return await asyncio.wrap_future(encoding)
