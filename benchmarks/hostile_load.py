"""The clients of ``hostile_clients.py``, honest or hostile, in a process of their own. Prints JSON.

    python benchmarks/hostile_load.py honest|hostile URL SECONDS
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

STREAMS, PROMPT, TOKENS = 100, "the quick brown fox jumps over the lazy dog ", 64
MIB = 2**20
KINDS = {
    "a prompt of 9.9 MiB": 0.5, "a text of 0.9 MiB": 0.5, "a text of 0.9 MiB to be truncated": 0.25, "200,000 token ids": 0.5, "200,000 wrong prompts": 0.5,
    "brackets, 1,000,000 deep": 0.5, "a lone surrogate": 10, "absurd numbers": 10, "100,000 stop strings": 0.5, "a leaving reader": 2,
}  # fmt: skip
"""Requests a second of each kind."""
SLOW, UNFINISHED, IDLE = 40, 20, 300
"""Connections that send a byte of their body a second, that stop in the middle of one, and that send nothing."""


def post(path: str, content: bytes, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode() + content


def body(**fields: object) -> bytes:
    return post("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode())


def requests() -> dict[str, bytes]:
    """Returns the request of each kind."""
    text = "".join(random.Random(0).choices("abcdefghijklmnop qrstuvwxyz", k=int(0.9 * MIB)))
    return {
        "a prompt of 9.9 MiB": body(prompt="x" * int(9.9 * MIB)),
        "a text of 0.9 MiB": body(prompt=text),
        "a text of 0.9 MiB to be truncated": body(prompt=text, truncate_prompt_tokens=5),
        "200,000 token ids": body(prompt=[5] * 200_000),
        "200,000 wrong prompts": body(prompt=[{}] * 200_000),
        "brackets, 1,000,000 deep": post("/v1/completions", b'{"prompt": ' + b"[" * 10**6),
        "a lone surrogate": body(user="\ud800", stop=["\udfff"]),
        "absurd numbers": body(n=10**9, max_tokens=10**18, logprobs=10**9, best_of=10**9, temperature=float("nan")),
        "100,000 stop strings": body(stop=[f"s{i}" for i in range(100_000)]),
        "a leaving reader": body(max_tokens=400, stream=True, ignore_eos=True),
    }


async def honest(host: str, port: int, seconds: float) -> dict[str, list[float]]:
    """Streams, one after the other in each of ``STREAMS`` clients. Returns seconds to the first token and between two tokens."""
    ends = time.monotonic() + seconds
    first: list[float] = []
    between: list[float] = []
    failed = 0

    async def client(number: int) -> None:
        nonlocal failed
        await asyncio.sleep(number / STREAMS)
        while time.monotonic() < ends:
            reader, writer = await asyncio.open_connection(host, port)
            before, count = time.monotonic(), 0
            writer.write(body(prompt=f"{number} {PROMPT}", max_tokens=TOKENS, stream=True, ignore_eos=True))
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    (between if count else first).append(now - before)
                    before, count = now, count + 1
            failed += count == 0
            writer.close()

    await asyncio.gather(*(client(number) for number in range(STREAMS)))
    return {"first": first, "between": between, "failed": [float(failed)]}


async def hostile(host: str, port: int, seconds: float) -> dict[str, dict[str, int]]:
    """Returns how often each kind was answered with which status; 0: with none."""
    # The clients of an attack run elsewhere; here they must not take the cores of the server.
    os.nice(19)
    ends = time.monotonic() + seconds
    sent = requests()
    answers: dict[str, Counter[str]] = {}

    async def ask(kind: str, content: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None) -> None:
        status = "0"
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(max(0.1, ends - time.monotonic())):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    with contextlib.suppress(OSError):
                        writer.write(content)
                        await writer.drain()
                        if then is not None:
                            await then(writer)
                    status = (await reader.readline()).decode().split(" ")[1]
                    if kind != "a leaving reader":
                        await reader.read()
                except IndexError:
                    pass
                finally:
                    writer.close()
        answers.setdefault(kind, Counter())[status] += 1

    async def repeat(kind: str, rate: float) -> None:
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < ends:
                group.create_task(ask(kind, sent[kind]))
                await asyncio.sleep(1 / rate)

    async def drip(writer: asyncio.StreamWriter) -> None:
        while time.monotonic() < ends:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(1)

    async def keep(kind: str, content: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None) -> None:
        while time.monotonic() < ends:
            await ask(kind, content, then)
            await asyncio.sleep(1)

    slow, unfinished = post("/v1/completions", b"{", 1000), post("/v1/completions", b" " * int(0.9 * MIB), MIB)
    await asyncio.gather(
        *(repeat(kind, rate) for kind, rate in KINDS.items()),
        *(keep("a body of one byte a second", slow, drip) for _ in range(SLOW)),
        *(keep("a body that stops", unfinished) for _ in range(UNFINISHED)),
        *(keep("a connection that sends nothing", b"") for _ in range(IDLE)),
    )
    return {kind: dict(counts) for kind, counts in answers.items()}


if __name__ == "__main__":
    host, port = sys.argv[2].removeprefix("http://").split(":")
    work = {"honest": honest, "hostile": hostile}[sys.argv[1]]
    print(json.dumps(asyncio.run(work(host, int(port), float(sys.argv[3])))))  # type: ignore[operator]
