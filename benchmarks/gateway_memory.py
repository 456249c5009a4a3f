"""What memory a gateway holds: over 100,000 requests, and with 5,000 idle streams.

One `tandem gateway` process before a backend that computes nothing (`gateway_stub.py`), with limits and a log line for each request, as in service. 64
clients ask one request after the other: half of them whole, half streamed, each prompt of its own and up to 4 KB; every eighth client leaves after the first
bytes of its answer. The resident size of the process is read after every tenth of the requests; the first tenth warms it up. Then a fresh gateway opens
5,000 streams, each at rest after its first token: its resident size then, after they were all closed, and what it says that it still holds.

    python benchmarks/gateway_memory.py [--requests 100000] [--streams 5000] [--out benchmarks/results]
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from machine import HERE, ROOT, machine, write_report
from options import parser as shared_parser

for room in (".", "gateway"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from gateway_process import Gateway, gateway  # noqa: E402 - found by the lines above
from http_processes import HttpProcess, until  # noqa: E402

CLIENTS = 64
CUT_EVERY = 8
LONGEST_PROMPT = 4096
MB = 1e6
SETTINGS = {
    "other_tenants": {"limits": {"tokens_per_day": 10**12, "concurrent": 10**6}},
    "stall_s": 3600, "timeouts": {"first_byte_s": 3600, "idle_s": 3600},
}  # fmt: skip


@contextmanager
def stub(between_s: float) -> Iterator[HttpProcess]:
    """A backend in a process of its own."""
    with subprocess.Popen([sys.executable, str(HERE / "gateway_stub.py"), str(between_s)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield HttpProcess(process, f"http://127.0.0.1:{int(process.stdout.readline())}", None)  # type: ignore[arg-type]
        finally:
            process.kill()


def settings(backend: HttpProcess) -> dict[str, Any]:
    """Returns the settings of a gateway that refuses none of the requests."""
    return {**SETTINGS, "backends": [{"url": backend.url, "max_requests": 10**5}]}


def request_of(rng: random.Random, *, stream: bool) -> bytes:
    prompt = "x" * rng.randrange(LONGEST_PROMPT) + str(rng.random())
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "stream": stream}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class Client:
    """Asks ``count`` requests, one after the other. ``answered`` and ``cut`` count them."""

    def __init__(self, port: int, seed: int, count: int) -> None:
        self._port, self._rng, self._left = port, random.Random(seed), count
        self.answered = self.cut = 0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        for number in range(self._left):
            stream = bool(number % 2)
            writer.write(request_of(self._rng, stream=stream))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            if number % CUT_EVERY == CUT_EVERY - 1:
                self.cut += 1
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                continue
            if stream:
                await reader.readuntil(b"[DONE]")
                await reader.readuntil(b"0\r\n\r\n")
            else:
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            self.answered += 1
        writer.close()


def over_requests(count: int, folder: Path) -> list[str]:
    """Returns the lines of the report on ``count`` requests."""
    lines = ["| requests | answered | cut | resident MB | of the size after the first tenth | open files |", "| --- | --- | --- | --- | --- | --- |"]
    with stub(0.0) as backend, gateway(folder, [backend], **settings(backend)) as running:
        process, port = psutil.Process(running.process.pid), int(running.url.rpartition(":")[2])
        answered = cut = 0
        first = 0.0
        for tenth in range(10):
            clients = [Client(port, tenth * CLIENTS + number, count // 10 // CLIENTS) for number in range(CLIENTS)]

            async def run(clients: list[Client] = clients) -> None:
                await asyncio.gather(*(client.run() for client in clients))

            asyncio.run(run())
            answered, cut = answered + sum(client.answered for client in clients), cut + sum(client.cut for client in clients)
            until(lambda: running.metric("open_requests") == 0, "the end of the requests")
            size = process.memory_info().rss
            first = first or size
            lines.append(f"| {answered + cut:,} | {answered:,} | {cut:,} | {size / MB:.1f} | {size / first:.3f} | {process.num_fds()} |")
            print(lines[-1], flush=True)
        return [*lines, "", f"Left: {held(running)}."]


def idle_streams(count: int, folder: Path) -> list[str]:
    """Returns the lines of the report on ``count`` streams that are open at once."""
    with stub(3600.0) as backend, gateway(folder, [backend], **settings(backend)) as running:
        process, port = psutil.Process(running.process.pid), int(running.url.rpartition(":")[2])
        before = process.memory_info().rss

        async def hold() -> tuple[int, int, float]:
            rng, began = random.Random(0), time.perf_counter()
            writers = []

            async def one() -> None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request_of(rng, stream=True))
                await reader.readuntil(b"word0")
                writers.append((reader, writer))

            for _ in range(0, count, 100):
                await asyncio.gather(*(one() for _ in range(100)))
            seconds = time.perf_counter() - began
            await asyncio.sleep(2)
            size, files = process.memory_info().rss, process.num_fds()
            for _, writer in writers:
                writer.close()
            return size, files, seconds

        size, files, seconds = asyncio.run(hold())
        until(lambda: running.metric("open_requests") == 0, "the end of the streams")
        after = process.memory_info().rss
        return [
            f"{count:,} idle streams, opened in {seconds:.1f} s: {size / MB:.0f} MB resident ({before / MB:.0f} MB before, so "
            f"{(size - before) / count / 1e3:.1f} KB each), {files:,} open files; {after / MB:.0f} MB after they were closed. Left: {held(running)}.",
        ]  # fmt: skip


def held(running: Gateway) -> str:
    """Returns in words what an idle gateway still holds."""
    until(lambda: running.metric("client_connections") <= 1, "the connections to be closed")
    names = ("open_requests", "reservations", "in_flight_requests", "outstanding_tokens", "unfinished_body_bytes", "client_connections", "tasks")
    return ", ".join(f"{name} {running.metric(name):.0f}" for name in names) + " (the last two with the request that asks)"


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=5_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        streams = idle_streams(options.streams, Path(work))
        print(*streams, flush=True)
        lines = ["# Memory of a gateway", "", machine(), "", (__doc__ or "").split("\n\n")[1], "", *over_requests(options.requests, Path(work)), "", *streams]
    print(f"wrote {write_report('gateway-memory', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
