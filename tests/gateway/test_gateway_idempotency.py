"""Requests that are repeated with their key: the same tokens at another gateway, from the position that the client has."""

import base64
import json
import os
import random
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway, fault_backend, gateway, until
from test_gateway_resume import content, stream

from tandem.gateway.resume import Repetition, seed_of
from tandem.gateway.stream_events import Diverged
from tandem.gateway.stream_position import Position

KEY = {"Idempotency-Key": "order 66"}


def last_id(events: bytes) -> bytes:
    return re.findall(rb"^id: (.*)$", events, flags=re.M)[-1]


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_goes_on_from_any_id_however_often_it_breaks(seed: int) -> None:
    draw = random.Random(seed)
    kind = draw.choice(["chat", "text"])
    choices = [[(draw.choice(["a", "bc", "", "é", "😀 ", "\n"]), draw.random()) for _ in range(draw.randint(1, 25))] for _ in range(draw.randint(1, 3))]
    usage = draw.random() < 0.5
    whole = stream(draw, choices, kind, usage=usage, id="first")
    one = Repetition(Position(), has_ids=True)
    one.begin("0.7")
    received = b"".join(one.rest(event) for event in whole[: draw.randint(1, len(whole) - 1)])
    for number in range(3):
        # The gateway has died, and of the next one a backend: each begins anew, with other parts, under another id.
        position = Position.of_id(last_id(received))
        assert position.weights == "0.7"
        resumed = Repetition(position, has_ids=True)
        for _ in range(draw.randint(0, 2)):
            other = stream(draw, choices, kind, usage=usage, id=f"other {number}")
            received += b"".join(resumed.rest(event) for event in other[: draw.randint(0, len(other) - 2)])
            resumed = resumed.again()
        other = stream(draw, choices, kind, usage=usage, id=f"other {number}")
        end = len(other) if number == 2 else draw.randint(0, len(other) - 1)
        received += b"".join(resumed.rest(event) for event in other[:end])
    assert content(received) == content(b"".join(whole))


def test_another_text_before_the_position_ends_the_stream() -> None:
    draw = random.Random(1)
    words = [(f"w{i} ", 0.5) for i in range(10)]
    one = Repetition(Position(), has_ids=True)
    received = b"".join(map(one.rest, stream(draw, [words], "text", usage=False, id="a")[:3]))
    for other in (words[:1] + [("xx ", 0.5)] * 9, words[:1]):
        with pytest.raises(Diverged, match="weights"):
            Repetition(Position.of_id(last_id(received))).rest(b"".join(stream(draw, [other], "text", usage=False, id="b")))


@pytest.mark.parametrize("given", [
    b"7", b"", b"!!", b"[]", base64.urlsafe_b64encode(b"[1,2,3,4]"), base64.urlsafe_b64encode(b'["w",[[0,{"text":[-1,"d"]},{},true,false]],false,{}]'),
    base64.urlsafe_b64encode(b'["w",[["0",{},{},true,false]],false,{}]'), base64.urlsafe_b64encode(b'["w",[[0,{},[1],true,false]],false,{}]'),
    base64.urlsafe_b64encode(b"[" * 100_000), b"\xff",
])  # fmt: skip
def test_what_is_no_position_is_refused(given: bytes) -> None:
    with pytest.raises(ValueError):
        Position.of_id(given)


def read_some(running: Gateway, body: dict[str, Any], events: int) -> bytes:
    """Returns the first whole ``events`` of a stream, whose client then leaves."""
    received = b""
    with running.client.stream("POST", running.url + "/v1/completions", json=body, headers=KEY) as response:
        assert response.status_code == 200 and response.headers["x-tandem-repeatable"] == "true"
        for part in response.iter_bytes():
            received += part
            if received.count(b"\n\n") >= events:
                break
    return received[: received.rindex(b"\n\n") + 2]


def test_where_a_gateway_dies_another_goes_on(tmp_path: Path) -> None:
    ask = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 12}
    with fault_backend("first", "m", "1") as first, fault_backend("second", "m", "1") as second, gateway(tmp_path, [second]) as heir:
        with gateway(tmp_path, [first]) as running:
            first.mode("stall")
            received = read_some(running, ask, 4)
            seed = json.loads(first.stats()["last"]["body"])["seed"]
            running.stop(signal.SIGKILL)
        rest = heir.post("/v1/completions", ask, headers={**KEY, "Last-Event-ID": last_id(received).decode()})
        assert rest.status_code == 200
        events = content(received + rest.content)
        assert events[0] == {0: "".join(f"w{i} " for i in range(12))} and len(events[5]) == 1 and events[6] == 1
        assert json.loads(second.stats()["last"]["body"])["seed"] == seed == seed_of("127.0.0.1\0order 66"), "the key gives the seed"
        again = heir.post("/v1/completions", {**ask, "stream": False}, headers=KEY)
        assert again.headers["x-tandem-repeatable"] == "true" and json.loads(second.stats()["last"]["body"])["seed"] == seed
        second.mode("ok", word="v")
        other = heir.post("/v1/completions", ask, headers={**KEY, "Last-Event-ID": last_id(received).decode()})
        assert "other tokens" in other.text and other.text.endswith("data: [DONE]\n\n")
        for headers, body, says in (
            ({**KEY, "Last-Event-ID": "7"}, ask, "is not the id of an event"),
            ({"Last-Event-ID": "7"}, ask, "needs the Idempotency-Key"),
            ({**KEY, "Last-Event-ID": "7"}, {**ask, "stream": False}, "set 'stream' to true"),
            ({"Idempotency-Key": "k" * 300}, ask, "at most 256"),
        ):
            refused = heir.post("/v1/completions", body, headers=headers)
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]


def test_a_backend_that_promises_no_same_tokens_is_said_to(tmp_path: Path) -> None:
    ask = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 3}
    with fault_backend("only") as backend, gateway(tmp_path, [backend]) as running:
        answer = running.post("/v1/completions", ask, headers=KEY)
        assert answer.headers["x-tandem-repeatable"] == "false" and b"id: " not in answer.content and answer.text.endswith("data: [DONE]\n\n")
        assert "seed" not in json.loads(backend.stats()["last"]["body"])
        position = Position(weights="1")
        refused = running.post("/v1/completions", ask, headers={**KEY, "Last-Event-ID": position.to_id()})
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "cannot_resume"


@pytest.mark.full
def test_a_killed_gateways_streams_go_on_at_another_with_the_same_tokens(tmp_path: Path) -> None:
    """Real servers: a gateway is killed while a stream sampled at temperature 1 is read. It is repeated with its key and its last id at another gateway, before
    another server, and together the parts are what one server gives alone."""
    from server_process import server
    from tiny_model import make_model, make_tokenizer

    model = make_model(tmp_path / "model", make_tokenizer(tmp_path / "tokenizer"), 0)
    body = {"model": "m", "temperature": 1, "max_tokens": 300, "ignore_eos": True, "n": 2, "logprobs": 2, "return_token_ids": True, "stream": True,
            "prompt": "the quick", "stream_options": {"include_usage": True}}  # fmt: skip
    with ExitStack() as stack:
        servers = [stack.enter_context(server(model, tmp_path, "--served-model-name", "m")) for _ in range(2)]
        heir = stack.enter_context(gateway(tmp_path, servers[1:]))
        with gateway(tmp_path, servers[:1]) as running:
            until(lambda: running.metric("backend_ready") == 1 and heir.metric("backend_ready") == 1, "both servers")
            received = read_some(running, body, 9)
            os.kill(running.process.pid, signal.SIGKILL)
        rest = heir.post("/v1/completions", body, headers={**KEY, "Last-Event-ID": last_id(received).decode()})
        assert rest.status_code == 200
        alone = servers[1].post("/v1/completions", {**body, "seed": seed_of("127.0.0.1\0order 66")})
        got = content(received + rest.content)
        assert got[:5] == content(alone.content)[:5] and len(got[1][0, "token_ids"]) == 300 and len(got[5]) == 1
