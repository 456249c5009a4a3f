"""The clients of ``gateway.py`` in a process of their own. Prints JSON: requests answered, seconds, failures, seconds to the first token and between tokens.

    python benchmarks/gateway_load.py URL closed|open stream|whole CONNECTIONS_OR_RATE SECONDS

``closed``: each connection asks again when it is answered. ``open``: requests begin at random times (Poisson), whatever the answers take.
"""

import asyncio
import json
import random
import sys
import time
from urllib.parse import urlsplit

KEY = "tk-000000000000-benchmark"
_PROMPT = "What is the sum of the digits of this number, and of the next one? " * 2


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.first_s: list[float] = []
        self.between_s: list[float] = []
        self.answered = self.failed = 0
        self.ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended is not None and not self.ended.done():
            self.failed += 1
            self.ended.set_result(None)

    def ask(self, request: bytes) -> "asyncio.Future[None]":
        self.data, self.at, self.last = bytearray(), time.perf_counter(), 0.0
        self.ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.ended

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if b"data: {" in data:
            if self.last:
                self.between_s.append(now - self.last)
            else:
                self.first_s.append(now - self.at)
            self.last = now
        self.data += data
        if self._is_complete() and self.ended is not None and not self.ended.done():
            if not self.last:
                self.first_s.append(now - self.at)
            good = self.data.startswith(b"HTTP/1.1 200")
            self.answered, self.failed = self.answered + good, self.failed + (not good)
            self.ended.set_result(None)

    def _is_complete(self) -> bool:
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self.data[:end]).lower()
        if b"transfer-encoding: chunked" in head:
            return self.data.endswith(b"0\r\n\r\n")
        start = head.find(b"content-length:")
        return start >= 0 and len(self.data) >= end + 4 + int(head[start + 15 :].split(b"\r\n")[0])


async def main(url: str, how: str, kind: str, amount: float, seconds: float) -> None:
    parts = urlsplit(url)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 16, "stream": kind == "stream"}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    loop, clients = asyncio.get_running_loop(), []

    async def client() -> Client:
        _, one = await loop.create_connection(Client, parts.hostname, parts.port)
        clients.append(one)
        return one

    began = time.perf_counter()
    ends = began + seconds
    if how == "closed":
        async def keep_asking() -> None:
            one = await client()
            while time.perf_counter() < ends and not one.transport.is_closing():
                await one.ask(request)

        await asyncio.gather(*(keep_asking() for _ in range(int(amount))))
    else:
        idle: list[Client] = []

        async def ask_once() -> None:
            one = idle.pop() if idle else await client()
            await one.ask(request)
            if not one.transport.is_closing():
                idle.append(one)

        tasks, at = [], began
        while at < ends:
            at += random.expovariate(amount)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(ask_once()))
        await asyncio.gather(*tasks)
    taken = time.perf_counter() - began
    print(json.dumps({
        "answered": sum(one.answered for one in clients), "failed": sum(one.failed for one in clients), "seconds": taken,
        "first_s": [s for one in clients for s in one.first_s], "between_s": [s for one in clients for s in one.between_s],
    }))  # fmt: skip


if __name__ == "__main__":
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5])))
