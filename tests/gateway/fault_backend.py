"""A small server of OpenAI's completions that fails on command, in a process of its own. It writes HTTP itself, so that it can write it wrongly.

    python fault_backend.py NAME MODEL[,MODEL] [WEIGHTS [HOST PORT]]      prints its port; with WEIGHTS it says that it is Tandem's server

``POST /mode`` with ``{"mode": ..., "delay_s": ...}`` sets what it does with the next requests (``gate``: they wait for another mode); ``GET /stats`` says
what it has seen. ``times`` of a mode: for so many requests. ``adapters``: adapters that it has loaded, with their models. ``kv_cache``: what it says of its
KV cache. ``echo`` of a request: the word that it answers with.
"""

import asyncio
import json
import socket
import struct
import sys
from collections import Counter
from typing import Any

MALFORMED = {
    "no_event": b"hello\n\n", "half_json": b'data: {"choices": [\n\n', "no_text": b"data: \xff\xfe\0\n\n", "comments": b": x\n\n" * 1000,
    "no_end": b"x" * 2**25, "bad_chunk": b"zz\r\n",
}  # fmt: skip
"""What it writes, in modes of these names, in the middle of a stream."""


class Backend:
    def __init__(self, name: str, models: list[str], weights: str | None) -> None:
        self.name, self.models = name, models
        self.owner = {"owned_by": "tests"} if weights is None else {"owned_by": "tandem", "weight_version": [0, int(weights)]}
        self.word = "w"
        self.mode, self.delay_s, self.is_ready = "ok", 0.0, True
        self.times = 0
        self.seen: Counter[str] = Counter()
        self.last: dict[str, Any] = {}
        self.adapters: dict[str, str] = {}
        self.kv_cache: dict[str, Any] | None = None
        self.running = 0
        self.opened = asyncio.Event()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self.request(head, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def request(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; returns whether the connection stays."""
        line, *lines = head.decode("latin-1").rstrip().split("\r\n")
        method, path, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/mode":
            given = json.loads(body)
            self.mode, self.delay_s, self.is_ready = given.get("mode", "ok"), given.get("delay_s", 0.0), given.get("ready", True)
            self.times = given.get("times", 0)
            self.opened.clear() if self.mode == "gate" else self.opened.set()
            self.word, self.adapters = given.get("word", "w"), given.get("adapters", {})
            self.kv_cache = given.get("kv_cache")
            return self.json(writer, {})
        if path == "/stats":
            return self.json(writer, {"seen": self.seen, "last": self.last, "running": self.running})
        if method == "GET":
            if self.mode in ("hang", "dead"):
                await asyncio.sleep(3600)
            if path.startswith("/kv_cache"):
                return self.json(writer, self.kv_cache or {}, 404 if self.kv_cache is None else 200)
            if path == "/readiness":
                return self.json(writer, {}, 200 if self.is_ready else 503)
            adapters = [{"id": name, "object": "model", "parent": model} for name, model in self.adapters.items()]
            return self.json(writer, {"object": "list", "data": [*({"id": model, "object": "model", **self.owner} for model in self.models), *adapters]})
        self.seen["requests"] += 1
        self.last = {"path": path, "headers": headers, "body": body.decode()}
        self.running += 1
        answering = asyncio.create_task(self.answer(json.loads(body), writer))
        left = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({answering, left}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            self.seen["aborted"] += 1
            return False
        finally:
            self.running -= 1
            answering.cancel()
            left.cancel()
            await asyncio.gather(answering, left, return_exceptions=True)

    def json(self, writer: asyncio.StreamWriter, content: Any, status: int = 200, more: str = "", cut: int = 0) -> bool:
        body = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) - cut])
        return not cut

    async def answer(self, content: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if self.mode == "gate":
            await self.opened.wait()
        mode = self.mode
        if self.times:
            self.times -= 1
            self.mode = mode if self.times else "ok"
        if mode in ("hang", "deaf"):
            await asyncio.sleep(3600)
        if mode == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if mode == "garbage":
            writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            return False
        await asyncio.sleep(self.delay_s)
        if mode.isdigit():
            more = "Retry-After: 7\r\n" if mode in ("429", "503") else ""
            return self.json(writer, {"error": {"message": f"{self.name} says {mode}", "type": "t", "param": None, "code": None}}, int(mode), more)
        word = f"{content['echo']}-" if "echo" in content else self.name if content.get("who") else self.word
        words = [f"{word}{i} " for i in range(content.get("max_tokens", 16))]
        usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
        if not content.get("stream"):
            answer = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": "".join(words), "finish_reason": "length"}], "usage": usage}
            return self.json(writer, answer, more="X-Backend: yes\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n", cut=5 if mode == "truncated" else 0)
        return await self.stream(mode, words, writer)

    async def stream(self, mode: str, words: list[str], writer: asyncio.StreamWriter) -> bool:
        is_chunked = mode != "half_closed"
        framing = b"Transfer-Encoding: chunked" if is_chunked else b"Connection: close"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n\r\n")

        def part(data: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)

        for i, word in enumerate(words):
            event = json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": word, "finish_reason": None}]})
            data = f"data: {event}\n\n".encode()
            if i == len(words) // 2 and mode in ("half_closed", "cut"):
                part(data[:20])  # In the middle of an event.
                await writer.drain()
                return False
            if i == len(words) // 2 and mode in MALFORMED:
                writer.write(MALFORMED[mode]) if mode == "bad_chunk" else part(MALFORMED[mode])
            if i == len(words) // 2 and mode == "stall":
                await asyncio.sleep(3600)
            part(data)
            await writer.drain()
            await asyncio.sleep(self.delay_s)
        if mode == "unfinished":
            writer.write(b"0\r\n\r\n")
            return True
        part(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return is_chunked


async def main(name: str, models: str, weights: str = "", host: str = "127.0.0.1", port: str = "0") -> None:
    backend = Backend(name, models.split(","), weights or None)
    server = await asyncio.start_server(backend.connection, host, int(port), limit=2**24, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
