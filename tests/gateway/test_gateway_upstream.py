"""Answers of backends as bytes, compared with the standard library's client, and connections that are used again."""

import asyncio
import contextlib
import http.client
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from routing_cases import backends, request

from tandem.gateway.attempt_failure import UpstreamFailed
from tandem.gateway.backend import Backend
from tandem.gateway.response_parser import MOST_HEAD_BYTES, NotHttp, ResponseParser
from tandem.gateway.upstream import Upstream
from tandem.gateway.upstream_connection import UpstreamConnection, address_of

CHUNKS = b"4\r\nWiki\r\n6;name=value\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
VALID = {
    "with a length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b c \t\r\n\r\nhello",
    "without a reason": b"HTTP/1.1 404 \r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "in chunks": CHUNKED + b"\r\n" + CHUNKS + b"0\r\n\r\n",
    "with trailers": CHUNKED + b"\r\n" + CHUNKS + b"000;last\r\nX-Sum: 7\r\nX-B: c\r\n\r\n",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "without a body": b"HTTP/1.1 204 No Content\r\n\r\n",
    "until the end": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it",
    "of HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold",
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "that closes": b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbusy",
}
KEPT = {"with a length", "without a reason", "in chunks", "with trailers", "empty", "without a body", "after 100"}


class Recorded:
    """A socket that has received ``data``."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def parsed(parts: list[bytes]) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    body = b"".join(parser.feed(part) for part in parts)
    return parser, body


@pytest.mark.parametrize("name", VALID)
def test_answers_are_read_as_the_standard_library_reads_them_however_they_are_cut(name: str) -> None:
    data = VALID[name]
    theirs = http.client.HTTPResponse(Recorded(data), method="POST")  # type: ignore[arg-type]
    theirs.begin()
    expected = theirs.read()
    headers = sorted((key.lower().encode(), value.strip().encode()) for key, value in theirs.getheaders())
    cuts = [[data], [data[i : i + 1] for i in range(len(data))], *([data[:i], data[i:]] for i in range(1, len(data)))]
    for parts in cuts:
        parser, body = parsed(parts)
        assert (parser.status, body, sorted(parser.headers)) == (theirs.status, expected, headers)
        assert parser.is_complete is (name != "until the end")
        assert parser.keeps_alive is (name in KEPT)
        assert parser.end(), "nothing is missing"


@pytest.mark.parametrize("name", VALID)
def test_an_answer_that_ends_before_its_end_is_not_complete(name: str) -> None:
    data = VALID[name]
    complete = next(size for size in range(len(data) + 1) if parsed([data[:size]])[0].end())
    assert complete == (data.index(b"\r\n\r\n") + 4 if name == "until the end" else len(data))


@pytest.mark.parametrize("data", [
    b"garbage\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 99 x\r\n\r\n", b"HTTP/1.1 2000 x\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: \r\n\r\n", CHUNKED + b"Content-Length: 5\r\n\r\n",
    CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n", b"HTTP/1.1 200 OK\r\nX : a\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: a\nY: b\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    CHUNKED + b"\r\n-1\r\n", CHUNKED + b"\r\n0x5\r\n", CHUNKED + b"\r\n\r\n", CHUNKED + b"\r\n5\nhello\r\n", CHUNKED + b"\r\n3\r\nhello\r\n",
    CHUNKED + b"\r\n" + b"1" * 13 + b"\r\n", CHUNKED + b"\r\n5;" + b"a" * 5000, CHUNKED + b"\r\n0\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * MOST_HEAD_BYTES, CHUNKED + b"\r\n0\r\nX: " + b"a" * (MOST_HEAD_BYTES + 8),
])  # fmt: skip
def test_what_could_be_read_in_two_ways_is_no_answer(data: bytes) -> None:
    for parts in ([data], [data[i : i + 7] for i in range(0, len(data), 7)]):
        with pytest.raises(NotHttp):
            parsed([*parts, b"\r\n"] if data.endswith(b"\n") else parts)


def test_more_than_the_answer_is_left_out_and_the_connection_is_not_used_again() -> None:
    for name in KEPT:
        parser, body = parsed([VALID[name] + b"HTTP/1.1 200 OK\r\n"])
        assert parser.is_complete and not parser.keeps_alive and b"HTTP" not in body, name


def test_a_url_becomes_an_address_and_no_line_of_a_head() -> None:
    one = address_of("https://[::1]/deep/path/")
    assert (one.host, one.port, one.is_tls, one.base, one.host_header) == ("::1", 443, True, "/deep/path", "[::1]")
    assert address_of("http://a.example:80").host_header == "a.example" and address_of("http://a.example:8000").host_header == "a.example:8000"
    assert address_of("http://bücher.example:81/a b").host_header == "xn--bcher-kva.example:81"
    assert address_of("http://bücher.example:81/a b").base == "/a%20b"


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[Upstream, Backend, list[int]]]:
    """Serves connections with ``handler``; gives what sends to it, and a list with the number of its connections."""
    count: list[int] = []

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count.append(1)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(counted, "127.0.0.1", 0)
    made = [backends(1, url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")[0]]
    upstream = Upstream(made, passes_keys=True, connect_s=30)
    try:
        yield upstream, made[0], count
    finally:
        upstream.close()
        server.close()


async def asked(reader: asyncio.StreamReader) -> bytes:
    """Reads a request; returns its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


async def whole(response: UpstreamConnection) -> bytes:
    parts = []
    while part := await response.read():
        parts.append(part)
    return b"".join(parts)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        body = await asked(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def test_a_connection_is_used_again_and_closed_when_an_answer_is_not_read_to_its_end() -> None:
    async def run() -> None:
        async with served(echo) as (upstream, backend, count):
            for _ in range(5):
                async with upstream.post(backend, request(), b"") as response:
                    assert (response.status, upstream.busy) == (200, 1) and await whole(response) == request().body
            assert (len(count), upstream.busy, upstream.idle) == (1, 0, 1)
            async with upstream.post(backend, request(), b""):
                pass
            assert (upstream.busy, upstream.idle) == (0, 0)
            async with upstream.post(backend, request(), b"") as response:
                await whole(response)
            assert len(count) == 2

    asyncio.run(run())


@pytest.mark.parametrize(("says", "why", "is_lost"), [
    (b"", "it closed the connection", True), (b"HTTP/1.1 200 OK\r\nConte", "it closed the connection", True),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "its answer is not complete", False),
    (CHUNKED + b"\r\n5\r\nhello\r\n", "its answer is not complete", False),
    (b"SSH-2.0-x\r\n\r\n", "its answer is not HTTP", False), (CHUNKED + b"\r\nzz\r\n", "its answer is not HTTP", False),
])  # fmt: skip
def test_what_fails_is_told_apart(says: bytes, why: str, is_lost: bool) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(says)

    async def run() -> None:
        async with served(breaks) as (upstream, backend, _):
            with pytest.raises(UpstreamFailed, match=why) as failed:
                async with upstream.post(backend, request(), b"") as response:
                    await whole(response)
            assert failed.value.is_lost is is_lost and (upstream.busy, upstream.idle) == (0, 0)

    asyncio.run(run())


def test_a_backend_that_is_not_there_is_no_connection() -> None:
    async def run() -> None:
        (nobody,) = backends(1, url="http://127.0.0.1:1")
        upstream = Upstream([nobody], passes_keys=True, connect_s=30)
        with pytest.raises(UpstreamFailed, match="no connection") as failed:
            async with upstream.post(nobody, request(), b""):
                pass
        assert failed.value.is_lost and upstream.busy == 0

    asyncio.run(run())


def test_what_a_backend_says_unasked_ends_the_connection() -> None:
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await asked(reader)
            writer.write(VALID["with a length"])
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(VALID["in chunks"])

    async def run() -> None:
        async with served(talks) as (upstream, backend, count):
            for number in range(1, 4):
                async with upstream.post(backend, request(), b"") as response:
                    assert await whole(response) == b"hello"
                idle = upstream.idle
                assert idle == 1
                while any(each.is_open for connections in upstream._idle.values() for each in connections):
                    await asyncio.sleep(0.005)
                assert len(count) == number

    asyncio.run(run())


def test_an_answer_that_nobody_reads_waits_at_its_backend_and_the_end_of_the_request_reaches_it() -> None:
    ended = asyncio.Event()

    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 2**16)
                await writer.drain()
        except ConnectionError:
            ended.set()

    async def run() -> None:
        async with served(pours) as (upstream, backend, _):
            async with upstream.post(backend, request(), b"") as response:
                while not response._is_paused:
                    await asyncio.sleep(0.005)
                held = response._held
                await asyncio.sleep(0.05)
                assert response._held == held < 2**21
                assert len(await response.read()) == held and await response.read()
            async with asyncio.timeout(60):
                await ended.wait()

    asyncio.run(run())


def test_headers_reach_the_backend_once_and_no_line_is_added() -> None:
    seen: list[Any] = []

    async def looks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def run() -> None:
        async with served(looks) as (upstream, backend, _):
            given = [(b"host", b"x"), (b"content-length", b"99"), (b"te", b"trailers"), (b"accept", b"a/b"), (b"connection", b"x-hop"), (b"x-hop", b"1"),
                     (b"x-request-id", b"other"), (b"authorization", b"Bearer k")]  # fmt: skip
            one = request(headers=given, client="10.0.0.1")
            async with upstream.post(backend, one, b"") as response:
                assert response.status == 200
            port = backend.config.url.rpartition(":")[2]
            assert seen[0].split(b"\r\n")[:-2] == [
                b"POST /v1/completions HTTP/1.1", b"host: 127.0.0.1:" + port.encode(), b"content-length: 2", b"x-request-id: id", b"accept: a/b",
                b"authorization: Bearer k", b"x-forwarded-for: 10.0.0.1",
            ]  # fmt: skip

    asyncio.run(run())
