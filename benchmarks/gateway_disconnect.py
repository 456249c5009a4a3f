"""How soon a client that leaves frees the engine.

`tandem serve` with a model of random parameters and one thread, behind `tandem gateway`, and without it. A client closes its connection while its request waits
for a place in the engine, 50 ms after the server has its prompt of 4,096 tokens, or when it has five events of its stream; alone, or beside 7 streams of others
(8 where it waits: the engine has 8 places). Milliseconds from the closing until the server has aborted the request (`GET /load`), and until the engine has
given its place back (`GET /kv_cache`, which has what the engine said last), as a client that polls both sees it: the time of a poll is in them. An engine hears
of it between two steps, of which the prompt alone is one or two; how long one that stays waits for its first token is in the last column.

    python benchmarks/gateway_disconnect.py [--repeats 40] [--out benchmarks/results]

Ends with exit code 1 where the server heard of a client later than 100 ms after it had left.
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from long_prompts import MODEL
from machine import machine, write_report
from options import parser as shared_parser
from serving import ready

from tandem.model.create_model import create_model
from tandem.runtime.process.processes import Threads

COMMAND = str(Path(sys.executable).with_name("tandem"))
PLACES, AIM_MS = 8, 100.0
WAITS, PROMPT, STREAM = "waits for a place", "has no token yet", "receives its stream"
MOMENTS = ((WAITS, PLACES), (PROMPT, 0), (PROMPT, PLACES - 1), (STREAM, 0), (STREAM, PLACES - 1))
"""When the client leaves, and beside how many streams."""
TOKENS = {WAITS: 32, PROMPT: 4096, STREAM: 32}
SETTLE_S = 0.05


@dataclass
class Measured:
    """Milliseconds of ``polls`` while nobody leaves, and of each time that a client left: until the server had ``aborted``, and until the engine had
    ``freed`` its place.
    ``first_token_ms``: from a request like these to its first token, where the client stays."""

    polls: list[float] = field(default_factory=list)
    aborted: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)
    first_token_ms: float = 0.0


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as sink:
        running = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, **Threads(1).environment()})
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


@contextlib.contextmanager
def server_and_gateway(work: Path) -> Iterator[tuple[str, str]]:
    """Gives the addresses of a server and of a gateway in front of it."""
    create_model(MODEL, 0, work / "model")
    serve = [COMMAND, "serve", str(work / "model"), "--served-model-name", "m", "--port", "0", "--threads", "1", "--max-num-seqs", str(PLACES)]
    with process(serve, work / "serve.log") as server:
        url, log = ready(server, work / "serve.log"), work / "gateway.log"
        (work / "gateway.json").write_text(json.dumps({"backends": [{"url": url}], "port": 0}))
        with process([COMMAND, "gateway", str(work / "gateway.json")], log) as gateway:
            while b"gateway at " not in log.read_bytes():
                assert gateway.poll() is None, log.read_text()
                time.sleep(0.05)
            yield url, "http://" + log.read_text().split("gateway at http://")[1].split()[0]


class Load:
    """What the server says of its requests."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60)

    async def open_requests(self) -> int:
        return int((await self._client.get("/load")).json()["server_load"])

    async def in_engine(self) -> int:
        state = (await self._client.get("/kv_cache")).json()
        return int(state["running"]) + int(state["waiting"])

    async def poll_ms(self) -> float:
        began = time.perf_counter()
        await self.open_requests()
        return 1000 * (time.perf_counter() - began)

    async def until(self, figure: Callable[[], Any], value: int) -> None:
        while await figure() != value:
            await asyncio.sleep(0)

    async def close(self) -> None:
        await self._client.aclose()


@contextlib.asynccontextmanager
async def asked(url: str, tokens: int, draw: random.Random) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Asks for a stream on a prompt of ``tokens`` tokens that no cache has. Closes the connection at the end."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": "m", "prompt": [draw.randrange(3, 90) for _ in range(tokens)], "max_tokens": 12000, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
    try:
        yield reader, writer
    finally:
        writer.close()


async def events(reader: asyncio.StreamReader, count: int) -> None:
    """Reads ``count`` events. Raises ``RuntimeError`` where the stream ends before."""
    received = 0
    while received < count:
        line = await reader.readline()
        if not line:
            raise RuntimeError(f"the stream ended after {received} events")
        received += line.startswith(b"data: {")


async def discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**16):
        pass


async def measure(server: str, door: str, moment: str, others: int, repeats: int, draw: random.Random) -> Measured:
    found, load = Measured(), Load(server)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(load.close)
        idle, reading = await load.open_requests(), []
        for _ in range(others):
            reader, _ = await stack.enter_async_context(asked(door, 32, draw))
            await events(reader, 1)
            reading.append(asyncio.create_task(discard(reader)))
        await load.until(load.in_engine, others)
        if moment != WAITS:
            began = time.perf_counter()
            async with asked(door, TOKENS[moment], draw) as (reader, _):
                await events(reader, 1)
            found.first_token_ms = 1000 * (time.perf_counter() - began)
            await load.until(load.in_engine, others)
        for _ in range(repeats):
            await load.until(load.open_requests, idle + others)
            async with asked(door, TOKENS[moment], draw) as (reader, writer):
                await load.until(load.open_requests, idle + others + 1)
                if moment == STREAM:
                    await events(reader, 5)
                else:
                    await asyncio.sleep(SETTLE_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0):
                            assert b"data: {" not in await reader.read(2**16), "its first token is there"
                found.polls.append(await load.poll_ms())
                began = time.perf_counter()
                writer.close()
                await load.until(load.open_requests, idle + others)
                found.aborted.append(1000 * (time.perf_counter() - began))
                await load.until(load.in_engine, others)
                found.freed.append(1000 * (time.perf_counter() - began))
        assert not any(task.done() for task in reading), "a stream beside ended"
        for task in reading:
            task.cancel()
    # What the others had is free before the next begins.
    load = Load(server)
    await load.until(load.in_engine, 0)
    await load.close()
    return found


def line(door: str, moment: str, others: int, found: Measured) -> str:
    def text(values: list[float]) -> str:
        return f"{statistics.median(values):.0f} / {statistics.quantiles(values, n=20, method='inclusive')[18]:.0f} / {max(values):.0f}"

    stays = f"{found.first_token_ms:.0f}" if found.first_token_ms else "-"
    return f"| {door} | {moment} | {others} | {text(found.polls)} | {text(found.aborted)} | {text(found.freed)} | {stays} |"


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=40, help="clients that leave, for each row")
    options = parser.parse_args()
    lines = ["# A client that leaves", "", machine(), "", (__doc__ or "").split("\n\n")[1], ""]
    lines += ["| through | the client leaves while it | other streams | a poll, ms p50 / p95 / most | aborted | given back | first token, ms |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    late, draw = list[str](), random.Random(0)
    with tempfile.TemporaryDirectory() as work, server_and_gateway(Path(work)) as (server, gateway):
        for door, url in (("the gateway", gateway), ("no gateway", server)):
            for moment, others in MOMENTS:
                found = asyncio.run(measure(server, url, moment, others, options.repeats, draw))
                lines.append(line(door, moment, others, found))
                print(lines[-1], flush=True)
                after = sum(each > AIM_MS for each in found.aborted)
                late += [f"{door}, {moment}, beside {others}: {after} of {options.repeats}"] if after else []
    lines += ["", f"Later than {AIM_MS:.0f} ms: {'; '.join(late) if late else 'none'}, of {options.repeats} clients a row."]
    print(f"wrote {write_report('gateway-disconnect', chr(10).join(lines), options.out)}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
