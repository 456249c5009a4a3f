"""Hostile clients: giant prompts, slow and unfinished bodies, many connections. Honest streams go on, and memory goes back."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import Server, server, until

from tandem.engine.llm import LLM
from tandem.runtime.rpc.client_connections import ClientConnections, client_of
from tandem.serving.bodies import UnfinishedBodies
from tandem.serving.errors import ApiError
from tandem.serving.limits import make_limits
from tandem.text.tokenizer import Tokenizer

TEXT = {"Content-Type": "application/json"}
MIB = 2**20


def escaped(text: str) -> str:
    """Returns the longest JSON string for ``text``: every UTF-16 unit as an escape."""
    units = text.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)) + '"'


@pytest.fixture(scope="module")
def capped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for bodies of 12 MiB, and few connections."""
    options = ("--max-body-mib", "12", "--max-connections-per-client", "48", "--max-num-seqs", "16")
    with server(model, tmp_path_factory.mktemp("capped"), *options) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def address(running: Server) -> tuple[str, int]:
    host, port = running.url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.full
def test_the_longest_prompt_that_fits_the_context_is_served_in_the_longest_json(shared: Server, llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    pieces = sorted((tokenizer.decode([token], skip_special_tokens=False) for token in range(3, 300)), key=lambda text: -len(text.encode()))
    longest = next(piece for piece in pieces if "\ufffd" not in piece and len(tokenizer.encode(piece * 511)) <= 511)
    body = f'{{"prompt": {escaped(longest * 511)}, "max_tokens": 1, "allowed_token_ids": {list(range(300)) * 8}}}'
    response = httpx.post(f"{shared.url}/v1/completions", content=body, headers=TEXT, timeout=60)
    assert response.status_code == 200, response.text
    ids = json.dumps({"prompt": [299] * 511, "max_tokens": 1, "logit_bias": {str(i): -99.99999999999999 for i in range(300)}}, indent=8)
    assert httpx.post(f"{shared.url}/v1/completions", content=ids, headers=TEXT, timeout=60).status_code == 200


@settings(max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=200) | st.builds(lambda part, count: part * count, st.sampled_from(["the quick", "o", "😀", "é", " ", "你好"]), st.integers(1, 300)))
def test_no_text_that_fits_the_context_is_refused_by_its_length(tokenizer_folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    limits = make_limits(tokenizer, len(tokenizer.encode(text)), 300, 64, None)
    limits.check_text(text, "prompt")
    assert limits.max_text_bytes is not None and len(escaped(text)) - 2 <= 6 * limits.max_text_bytes <= limits.max_body_bytes


@pytest.mark.full
def test_a_prompt_that_is_too_long_for_the_context_is_refused_before_it_is_encoded(capped: Server) -> None:
    before = psutil.Process(capped.process.pid).cpu_times().user
    for body in ({"prompt": "x" * 10_300_000}, {"prompt": [5] * 3_000_000}, {"prompt": [[5] * 600]}):
        response = capped.post("/v1/completions", {**body, "max_tokens": 1})
        assert response.status_code == 400 and "context" in response.json()["error"]["message"]
    chat = capped.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_300_000}]})
    assert chat.status_code == 400 and chat.json()["error"]["param"] == "messages"
    assert capped.post("/tokenize", {"prompt": "x" * 10_300_000}).status_code == capped.post("/detokenize", {"tokens": [5] * 10**6}).status_code == 400
    # Encoding one of them takes several seconds.
    assert psutil.Process(capped.process.pid).cpu_times().user - before < 4


def test_a_prompt_may_be_longer_where_it_is_truncated(capped: Server) -> None:
    for prompt in ("x" * 20_000, [5] * 20_000):
        body = capped.complete(prompt, truncate_prompt_tokens=7, max_tokens=1)
        assert body["usage"]["prompt_tokens"] == 7


def test_the_event_loop_answers_while_a_long_text_is_encoded_and_memory_goes_back(capped: Server) -> None:
    process = psutil.Process(capped.process.pid)
    body = {"prompt": "x" * MIB, "truncate_prompt_tokens": 5, "max_tokens": 1}
    capped.complete("x" * (MIB // 4), truncate_prompt_tokens=5, max_tokens=1)
    capped.wait_idle()
    asyncio.run(asyncio.sleep(2))
    before = process.memory_info().rss
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(capped.post, "/v1/completions", body) for _ in range(2)]
        answers = 0
        while not all(one.done() for one in asked):
            assert capped.get("/liveness").status_code == 200
            answers += 1
        assert all(one.result().status_code == 200 for one in asked)
    # Were the texts encoded on the event loop, there would be one answer for each.
    assert answers >= 20
    until(lambda: process.memory_info().rss <= 1.1 * before, f"memory to go back to {before / MIB:.0f} MiB", limit_s=30)


def test_unfinished_bodies_are_bounded_and_let_go(capped: Server) -> None:
    """A client that begins many uploads of 4 MiB is refused those above 32 MiB; another's request goes on."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {5 * MIB}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(12):
            connection = stack.enter_context(socket.create_connection(address(capped), timeout=30))
            connection.settimeout(0.3)
            with contextlib.suppress(OSError):
                connection.sendall(head + b" " * (4 * MIB))
            connections.append(connection)
        refused = 0
        for connection in connections:
            with contextlib.suppress(OSError):
                refused += b" 429 " in connection.recv(65536)
        assert 4 <= refused <= 6
    whole = {"prompt": "x" * 300_000, "truncate_prompt_tokens": 3, "max_tokens": 1}
    until(lambda: capped.post("/v1/completions", whole).status_code == 200, "room for another body")


def test_connections_of_one_client_are_bounded(capped: Server) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address(capped), timeout=30)) for _ in range(60)]
        refused = []
        for connection in held[49:]:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /liveness HTTP/1.1\r\nHost: a\r\n\r\n")
                answer = b""
                while part := connection.recv(65536):
                    answer += part
                refused.append(answer)
        assert len(refused) >= 8 and all(b" 429 " in answer and b"too many open connections" in answer for answer in refused)
    until(lambda: httpx.get(f"{capped.url}/liveness").status_code == 200, "a connection", limit_s=30)


def test_a_client_is_an_ipv4_address_or_an_ipv6_network() -> None:
    assert client_of("10.0.0.7") == client_of("::ffff:10.0.0.7") == "10.0.0.7"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff%eth0") != client_of("2001:db8:0:1::1")
    assert client_of("") == ""
    counted = ClientConnections(limit=3, client_limit=1)
    assert counted.add("10.0.0.1") and not counted.add("10.0.0.1") and counted.add("10.0.0.2") and not counted.is_full
    assert ClientConnections(9, 0).add("x") and counted.add("10.0.0.3") and counted.is_full
    for last in (1, 1, 2, 3):
        counted.remove(f"10.0.0.{last}")
    assert counted.count == 0 and not counted.by_client


def test_unfinished_bodies_are_counted_in_sum_and_by_client() -> None:
    bodies = UnfinishedBodies(limit_bytes=10, client_limit_bytes=6)
    free = 2**14
    with bodies.of("10.0.0.1") as first, bodies.of("10.0.0.1") as second, bodies.of("10.0.0.2") as other:
        first.take(free + 4)
        second.take(free)
        with pytest.raises(ApiError, match="your unfinished requests"):
            second.take(3)
        other.take(free)
        other.take(6)
        assert bodies.held_bytes == 10
        with bodies.of("10.0.0.3") as late, pytest.raises(ApiError, match="of all clients"):
            late.take(free + 1)
        with bodies.of("10.0.0.1") as small:
            small.take(free)
    assert bodies.held_bytes == 0
