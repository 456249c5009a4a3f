"""Clients that say exactly what became of each of their requests."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 120.0
WORDS = 8
_PROBE = b"GET /liveness HTTP/1.1\r\nHost: a\r\n\r\n"


@dataclass
class Tally:
    """What became of the requests of one fault.

    ``answered``: with the whole answer, and with that of no other request. ``refused``: with an error of OpenAI's form. ``cut``: visibly not whole, by an event
    with an error or by a connection that closed before its end. ``left``: the client left. ``lost``: no answer, or one that looks whole and is not.
    ``twice``: with more than one answer. ``leaked``: what was not given back afterwards.
    """

    answered: int = 0
    refused: int = 0
    cut: int = 0
    left: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def sent(self) -> int:
        return self.answered + self.refused + self.cut + self.left + len(self.lost)

    @property
    def wrong(self) -> list[str]:
        return [*self.lost, *self.twice, *self.leaked]


@dataclass(frozen=True)
class Request:
    """``leave_after``: parts of the answer after which the client leaves; ``None``: it stays. ``may_leave``: set when it may leave
    before the first part."""

    name: str
    stream: bool = False
    words: int = WORDS
    leave_after: int | None = None
    headers: str = ""
    prompt: str | tuple[int, ...] = "x"
    may_leave: asyncio.Event | None = None

    def to_bytes(self) -> bytes:
        content = {"model": "m", "prompt": self.prompt, "max_tokens": self.words, "stream": self.stream, "echo": self.name}
        body = json.dumps(content).encode()
        return f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n".encode() + body

    @property
    def text(self) -> str:
        """The whole answer to it."""
        return "".join(f"{self.name}-{number} " for number in range(self.words))


def requests(count: int, name: str = "r", **fields: Any) -> list[Request]:
    """Returns ``count`` requests, of which two of four are streamed: of two backends that take turns, each gets some of both."""
    return [Request(f"{name}{number}", number % 4 >= 2, **fields) for number in range(count)]


async def ask_all(url: str, asked: Sequence[Request], tally: Tally, *, may_close: bool = False) -> None:
    """Sends the requests at once and waits for what becomes of them. ``may_close``: the gateway may die, and its connections with it."""
    await asyncio.gather(*(ask(url, request, tally, may_close=may_close) for request in asked))


async def ask(url: str, request: Request, tally: Tally, *, may_close: bool = False) -> None:
    """Sends one request on a connection of its own and counts what becomes of it."""
    host, port = url.removeprefix("http://").split(":")
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=2**26)
            try:
                await _exchange(request, reader, writer, tally)
            finally:
                writer.close()
    except TimeoutError:
        tally.lost.append(f"{request.name}: nothing within {LIMIT_S:g} s")
    except (OSError, asyncio.IncompleteReadError) as error:
        if may_close:
            tally.cut += 1
        else:
            tally.lost.append(f"{request.name}: {type(error).__name__}")


async def _exchange(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Tally) -> None:
    writer.write(request.to_bytes())
    if request.leave_after == 0:
        await writer.drain()
        if request.may_leave is not None:
            await request.may_leave.wait()
        tally.left += 1
        return
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ")[1])
    parts: list[bytes] = []
    is_whole = True
    if b"\r\ncontent-length:" in head:
        parts.append(await reader.readexactly(int(head.partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0])))
    else:
        try:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
                if request.leave_after is not None and len(parts) >= request.leave_after:
                    tally.left += 1
                    return
            await reader.readuntil(b"\r\n")
        except (OSError, asyncio.IncompleteReadError):
            is_whole = False
    _count(request, status, b"".join(parts), tally, is_whole=is_whole)
    if is_whole and b"connection: close" not in head:
        # Behind the answer there is nothing but the answer to the next request.
        writer.write(_PROBE)
        rest = await reader.readuntil(b"\r\n\r\n")
        if not rest.startswith(b"HTTP/1.1 200") or not (await reader.readuntil(b"}")).startswith(b'{"status":"alive"}'):
            tally.twice.append(f"{request.name}: {rest[:80]!r} behind its answer")


def _count(request: Request, status: int, body: bytes, tally: Tally, *, is_whole: bool) -> None:
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")] if request.stream and status == 200 else [body]
    contents = [content for event in events if isinstance(content := _json(event), dict)]
    text = "".join(choice["text"] for content in contents for choice in content.get("choices", []))
    has_error = any(isinstance(content.get("error"), dict) and content["error"].get("message") for content in contents)
    if status >= 400 and is_whole and has_error:
        tally.refused += 1
    elif len(set(words := text.split())) < len(words) or any(not word.startswith(f"{request.name}-") for word in words):
        tally.twice.append(f"{request.name}: {text[:80]!r}")
    elif not request.text.startswith(text):
        tally.lost.append(f"{request.name}: a part of {text[:80]!r}")
    elif not is_whole or (has_error and events[-1] == b"[DONE]"):
        tally.cut += 1
    elif status == 200 and text == request.text and not has_error:
        tally.answered += 1
    else:
        tally.lost.append(f"{request.name}: {status} {body[-80:]!r}")


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
