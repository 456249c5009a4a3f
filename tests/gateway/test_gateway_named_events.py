"""Streams of ``/v1/responses`` and ``/v1/messages`` that go on at another server: the same events, each once, under the ids that the client has."""

import base64
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from chat_backend import running_app
from gateway_process import gateway
from http_processes import until

from tandem.gateway.named_events import NamedRepetition, is_ended
from tandem.gateway.named_position import NamedPosition
from tandem.gateway.resume import MOST_BYTES, Delivered
from tandem.gateway.stream_events import Diverged
from tandem.gateway.stream_position import Position
from tandem.serving.forms.answer import Answer
from tandem.serving.forms.anthropic import MessageWriter
from tandem.serving.forms.responses import ResponseWriter
from tandem.text.answer_events import CallArguments, CallBegun, Content, Event, Reasoning

TEXTS = ["I think 😀, so", "The answer é\n", '{"a": 1, "b": [2]}', "{}"]
Writer = Callable[[str], ResponseWriter | MessageWriter]
WRITERS: dict[str, Writer] = {
    "/v1/responses": lambda server: ResponseWriter(f"resp_{server}", "m", len(server)),
    "/v1/messages": lambda server: MessageWriter(f"msg_{server}", "m"),
}


def stream(path: str, server: str, draw: random.Random, texts: list[str] = TEXTS) -> list[bytes]:
    """Returns the events of a real writer of Tandem's server for an answer with reasoning, text and two calls, in parts of random sizes."""
    writer, answer, found = WRITERS[path](server), Answer(prompt=5), []
    kinds: list[Callable[[str], Event]] = [Reasoning, Content, CallArguments, CallArguments]

    def write(events: Any) -> None:
        # Now: the writer changes the objects of its events later.
        found.extend(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events)

    write(writer.begin(5))
    for number, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
        if kind is CallArguments:
            write(writer.take([CallBegun(f"tool{number}", f"call_{server}{number}")]))
        while text:
            size = draw.randint(1, 6)
            part, text = text[:size], text[size:]
            write(writer.take([kind(part)]))
    answer.finish_reason, answer.completion = "tool_calls", 17
    write(writer.finish(answer))
    return found


def merged(events: bytes) -> tuple[list[Any], list[int]]:
    """Returns the events with the parts of each text joined, as a client sees them in the end, and their numbers."""
    found: list[Any] = []
    numbers = []
    for block in events.decode().split("\n\n")[:-1]:
        *_, name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        numbers += [event.pop("sequence_number")] if "sequence_number" in event else []
        delta = event.get("delta")
        texts = [delta] if isinstance(delta, str) else [delta[name] for name in ("text", "thinking", "partial_json") if name in delta] if delta else []
        text = texts[0] if texts else None
        last = found[-1] if found else None
        about = (event["type"], event.get("index"), event.get("output_index"), event.get("item_id"))
        if text is not None and isinstance(last, list) and last[0] == about:
            last[1] += text
        else:
            found.append(event if text is None else [about, text])
    return found, numbers


def sent(events: bytes) -> NamedRepetition:
    """Returns what takes ``events`` out of a repetition."""
    delivered = Delivered()
    delivered.add(events)
    return delivered.named_repetition()


@pytest.mark.parametrize("path", WRITERS)
@pytest.mark.parametrize("seed", range(20))
def test_a_stream_goes_on_from_any_id_however_often_it_breaks(seed: int, path: str) -> None:
    draw = random.Random(seed)
    one = NamedRepetition(NamedPosition(), has_ids=True)
    one.begin("0.7")
    first = stream(path, "first", draw)
    received = b"".join(one.rest(event) for event in first[: draw.randint(1, len(first) - 1)])
    for number in range(3):
        # The gateway has died, and of the next one a backend: each begins anew, with other parts, under other ids.
        ids = re.findall(rb"^id: (.*)$", received, flags=re.M)
        assert len(ids) == received.count(b"\n\n")
        position = NamedPosition.of_id(ids[-1])
        assert position.weights == "0.7" and position.to_id().encode() == ids[-1]
        resumed = NamedRepetition(position, has_ids=True)
        for again in range(draw.randint(0, 2)):
            other = stream(path, f"{number}again{again}", draw)
            received += b"".join(resumed.rest(event) for event in other[: draw.randint(0, len(other) - 2)])
            resumed = resumed.again()
        other = stream(path, f"server{number}", draw)
        end = len(other) if number == 2 else draw.randint(0, len(other) - 1)
        received += b"".join(resumed.rest(event) for event in other[:end])
    found, numbers = merged(received)
    assert numbers == list(range(len(numbers)))
    plain = [re.sub(r'"call_\w+?([23])"', r'"call_\1"', json.dumps(each)) for each in (found, merged(b"".join(first))[0])]
    assert json.loads(plain[0]) == json.loads(plain[1])


@pytest.mark.parametrize("given", [
    b"7", b"", b"!!", b"[]", base64.urlsafe_b64encode(b"[1,2,3,4]"), Position().to_id().encode(), base64.urlsafe_b64encode(b"[" * 100_000),
    base64.urlsafe_b64encode(b'["w",-1,"",[],{},0,null]'), base64.urlsafe_b64encode(b'["w",1,"",[],{"a":["b","c"]},0,null]'),
    base64.urlsafe_b64encode(b'["w",1,"",3,{},0,null]'),
])  # fmt: skip
def test_what_is_no_position_of_named_events_is_refused(given: bytes) -> None:
    with pytest.raises(ValueError):
        NamedPosition.of_id(given)
    with pytest.raises(ValueError):
        Position.of_id(NamedPosition().to_id().encode())


@pytest.mark.parametrize("path", WRITERS)
@pytest.mark.parametrize("seed", range(40))
def test_two_halves_are_one_stream_wherever_it_is_cut(seed: int, path: str) -> None:
    draw = random.Random(seed)
    first, second, third = (stream(path, server, draw) for server in ("first", "another", "3rd"))
    received = b"".join(first[: draw.randint(1, len(first) - 1)])
    # The second one breaks too, and the third goes on from where the client is.
    repetition = sent(received)
    received += b"".join(repetition.rest(event) for event in second[: draw.randint(0, len(second) - 1)])
    rest, left = draw.choice([sent(received), repetition.again()]), third
    while left:
        count = draw.randint(1, 3)
        received += rest.rest(b"".join(left[:count]))
        left = left[count:]
    found, numbers = merged(received)
    assert numbers == list(range(len(numbers))) and (bool(numbers) is (path == "/v1/responses"))
    text = json.dumps(found)
    for number in (2, 3):
        # A call that began at a later server has that one's id, wherever it is named.
        ids = {server for server in ("first", "another", "3rd") if f"call_{server}{number}" in text}
        assert len(ids) == 1
        text = text.replace(f"call_{ids.pop()}{number}", f"call_first{number}")
    assert json.loads(text) == json.loads(json.dumps(merged(b"".join(first))[0]))
    assert is_ended(received) and not is_ended(first[0])


@pytest.mark.parametrize("path", WRITERS)
def test_another_answer_ends_the_stream(path: str) -> None:
    draw = random.Random(0)
    first = stream(path, "first", draw)
    received = b"".join(first[:-6])
    for other in (["I think 😀, no", *TEXTS[1:]], ["I think", *TEXTS[1:]], [TEXTS[0], "", *TEXTS[2:]]):
        with pytest.raises(Diverged, match="weights"):
            sent(received).rest(b"".join(stream(path, "b", draw, other)))
    for broken in (b'event: error\ndata: {"type": "error", "message": "full"}\n\n', b"data: {\n\n", b"data: []\n\n", b'data: {"a": 1}\n\n'):
        with pytest.raises(Diverged):
            sent(received).rest(broken)
    delivered = Delivered()
    delivered.add(b"x" * (MOST_BYTES + 1))
    assert not delivered.is_whole


class Server:
    """Answers as Tandem's server does, and breaks off after ``cut`` events."""

    def __init__(self, name: str) -> None:
        self.name, self.cut, self.texts = name, 10_000, TEXTS
        self.asked: list[dict[str, Any]] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "tandem", "weight_version": [0, 1]}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(stream(request.path, self.name, random.Random(len(self.asked)), self.texts)):
            if number == self.cut:
                assert request.transport is not None
                request.transport.close()
                break
            await response.write(event)
        return response

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.get("/readiness", self.models), *(web.post(path, self.answer) for path in WRITERS)])
        return app


def test_a_stream_of_named_events_goes_on_at_the_other_server(tmp_path: Path) -> None:
    first, second = Server("first"), Server("second")
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running_app(each.app())) for each in (first, second)]
        running = stack.enter_context(gateway(tmp_path, (), backends=[{"url": url, "name": str(number)} for number, url in enumerate(urls)]))
        until(lambda: running.metric("backend_ready") == 2, "both servers")
        for path in WRITERS:
            # From a server that breaks off to one that does not, whichever of them is asked first.
            resumed = running.metric("resumed_streams_total")
            first.cut = 7
            ask = {"model": "m", "input": "x", "messages": [], "max_tokens": 9, "stream": True}
            answers = [running.post(path, ask).content for _ in range(2)]
            assert all(is_ended(answer) for answer in answers) and running.metric("resumed_streams_total") > resumed
            whole = len(merged(b"".join(stream(path, "first", random.Random(0))))[0])
            assert [len(merged(answer)[0]) for answer in answers] == [whole] * 2
            ids = [{event["response"]["id"] for event in merged(answer)[0] if isinstance(event, dict) and "response" in event} for answer in answers]
            assert path == "/v1/messages" or all(len(each) == 1 for each in ids)
        assert all(isinstance(body["seed"], int) for server in (first, second) for body in server.asked)
        # Other weights after all: an error in the form of the stream.
        second.texts = ["No, I do not think so at all", *TEXTS[1:]]
        for path in WRITERS:
            texts: list[str] = []
            until(lambda: texts.append(running.post(path, ask).text) or "other tokens" in texts[-1], "a stream that cannot go on")  # noqa: B023
            last = texts[-1].split("\n\n")[-2].split("\n")
            assert last[0] == "event: error" and json.loads(last[1].removeprefix("data: "))["type"] == "error"


def test_where_a_gateway_dies_a_named_stream_goes_on_at_another(tmp_path: Path) -> None:
    first, second = Server("first"), Server("second")
    key = {"Idempotency-Key": "order 66"}
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running_app(each.app())) for each in (first, second)]
        one, heir = (stack.enter_context(gateway(tmp_path, (), backends=[url])) for url in urls)
        for path in WRITERS:
            ask = {"model": "m", "input": "x", "messages": [], "max_tokens": 9, "stream": True}
            until(lambda: one.metric("backend_ready") == heir.metric("backend_ready") == 1, "both servers")
            with one.client.stream("POST", one.url + path, json=ask, headers=key) as response:
                assert response.headers["x-tandem-repeatable"] == "true"
                received = b"".join(response.iter_bytes())
            # What the client had when the gateway died.
            received = b"".join(part + b"\n\n" for part in received.split(b"\n\n")[:9])
            last = re.findall(rb"^id: (.*)$", received, flags=re.M)[-1].decode()
            rest = heir.post(path, ask, headers={**key, "Last-Event-ID": last})
            assert rest.status_code == 200 and first.asked[-1]["seed"] == second.asked[-1]["seed"]
            whole = merged(b"".join(stream(path, "first", random.Random(0))))[0]
            found, numbers = merged(received + rest.content)
            assert numbers == list(range(len(numbers))) and is_ended(rest.content)
            assert json.loads(json.dumps(found).replace("call_second", "call_first")) == json.loads(json.dumps(whole))
            refused = heir.post(path, ask, headers={**key, "Last-Event-ID": Position().to_id()})
            assert refused.status_code == 400 and "is not the id of an event" in refused.json()["error"]["message"]
        os.kill(one.process.pid, signal.SIGKILL)
        assert heir.post("/generate", {"prompt": "x", "stream": True}, headers={**key, "Last-Event-ID": last}).status_code == 400


@pytest.mark.full
def test_named_streams_of_killed_servers_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Real servers and engines: of two, one is killed while it streams, sampled at temperature 1."""
    from server_process import server
    from tiny_model import make_model, make_tokenizer

    model = make_model(tmp_path / "model", make_tokenizer(tmp_path / "tokenizer"), 0)
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server(model, tmp_path, "--served-model-name", "m", "--chat-template", str(template))) for _ in range(2)]
        running = stack.enter_context(gateway(tmp_path, servers))
        until(lambda: running.metric("backend_ready") == 2, "both servers")
        fields = {"model": "m", "temperature": 1, "ignore_eos": True, "stream": True}
        asks = {
            "/v1/responses": {**fields, "input": "the quick", "max_output_tokens": 400},
            "/v1/messages": {**fields, "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 400},
        }  # fmt: skip
        streams = []
        for number in range(3):
            for path, ask in asks.items():
                request = {**ask, "seed": number}
                response = stack.enter_context(stack.enter_context(httpx.Client(timeout=120)).stream("POST", running.url + path, json=request))
                parts = response.iter_bytes()
                streams.append((path, request, next(parts), parts))
        os.kill(servers[0].process.pid, signal.SIGKILL)
        received = [(path, request, begun + b"".join(parts)) for path, request, begun, parts in streams]
        assert running.metric("resumed_streams_total") >= 1
        for path, request, events in received:
            assert is_ended(events)
            found, numbers = merged(events)
            alone = merged(servers[1].post(path, request).content)[0]
            assert [each[1] for each in found if isinstance(each, list)] == [each[1] for each in alone if isinstance(each, list)]
            assert len(found) == len(alone) and numbers == list(range(len(numbers)))
