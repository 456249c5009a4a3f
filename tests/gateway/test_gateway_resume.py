"""Streams that go on at another backend: the same text, tokens and log-probabilities, each once."""

import json
import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import fault_backend, gateway, until

from tandem.gateway.resume import MOST_BYTES, Delivered, seeded
from tandem.gateway.stream_events import Diverged

Token = tuple[str, float]


def stream(draw: random.Random, choices: list[list[Token]], kind: str, *, usage: bool, id: str) -> list[bytes]:
    """Returns the events of a stream of ``choices``, with their tokens in parts of random sizes, as a server under load writes them."""
    bodies: list[dict[str, Any]] = []
    left = {index: list(tokens) for index, tokens in enumerate(choices)}
    offsets = dict.fromkeys(left, 0)
    for index in left if kind == "chat" else ():
        bodies.append({"choices": [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}]})
    while left:
        index = draw.choice(list(left))
        part = [left[index].pop(0) for _ in range(min(len(left[index]), draw.randint(1, 4)))]
        text = "".join(word for word, _ in part)
        choice: dict[str, Any] = {"index": index, "finish_reason": None if left[index] else "length", "token_ids": [hash(word) % 1000 for word, _ in part]}
        if kind == "chat":
            choice |= {"delta": {"content": text}, "logprobs": {"content": [{"token": word, "logprob": value} for word, value in part], "refusal": None}}
        else:
            places = []
            for word, _ in part:
                places.append(offsets[index])
                offsets[index] += len(word)
            choice |= {"text": text, "logprobs": {"tokens": [word for word, _ in part], "token_logprobs": [value for _, value in part], "text_offset": places}}
        bodies.append({"choices": [choice]})
        if not left[index]:
            del left[index]
    if usage:
        bodies.append({"choices": [], "usage": {"completion_tokens": 9}})
    return [*(f"data: {json.dumps({'id': id, 'created': len(id), **body})}\n\n".encode() for body in bodies), b"data: [DONE]\n\n"]


def content(events: bytes) -> tuple[Any, ...]:
    """Returns all that a client reads of a stream."""
    bodies = [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: {")]
    texts: dict[int, str] = {}
    lists: dict[tuple[int, str], list[Any]] = {}
    ends: list[tuple[int, str]] = []
    roles = 0
    for body in bodies:
        for choice in body["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            texts[index] = texts.get(index, "") + choice.get("text", "") + delta.get("content", "")
            roles += "role" in delta
            for name, values in {**(choice.get("logprobs") or {}), "token_ids": choice.get("token_ids", [])}.items():
                if isinstance(values, list):
                    lists.setdefault((index, name), []).extend(values)
            ends += [(index, choice["finish_reason"])] if choice["finish_reason"] else []
    usages = [body["usage"] for body in bodies if body.get("usage")]
    return texts, lists, sorted(ends), roles, usages, {(body["id"], body.get("created")) for body in bodies}, events.count(b"[DONE]")


@pytest.mark.parametrize("seed", range(60))
def test_two_halves_are_one_stream_wherever_it_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    kind = draw.choice(["chat", "text"])
    choices = [[(draw.choice(["a", "bc", "", "é", "😀 ", "\n"]), draw.random()) for _ in range(draw.randint(1, 25))] for _ in range(draw.randint(1, 3))]
    usage = draw.random() < 0.5
    first, second = (stream(draw, choices, kind, usage=usage, id=id) for id in ("first", "other"))
    cut = draw.randint(1, len(first) - 1)
    delivered = Delivered()
    for event in first[:cut]:
        delivered.add(event)
    repetition = delivered.repetition()
    joined = b"".join(second)
    rest = b""
    while joined:
        # Several events may come at once.
        events = b"".join(second[: (count := draw.randint(1, 3))])
        second, joined = second[count:], joined[len(events) :]
        rest += repetition.rest(events)
    assert content(b"".join(first[:cut]) + rest) == content(b"".join(first))


@pytest.mark.parametrize("seed", range(40))
def test_reasoning_and_tool_calls_go_on_at_another_server_with_the_ids_that_the_client_has(seed: int) -> None:
    draw = random.Random(seed)
    texts = ["I think 😀", "The answer", '{"a": 1, "b": [2]}', "{}"]

    def server(id: str) -> list[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for number, text in enumerate(texts):
            if number >= 2:
                function = {"name": f"tool{number}", "arguments": ""}
                deltas.append({"tool_calls": [{"index": number - 2, "id": f"{id}{number}", "type": "function", "function": function}]})
            while text:
                size = draw.randint(1, 4)
                part, text = text[:size], text[size:]
                call = {"index": number - 2, "function": {"arguments": part}}
                deltas.append([{"reasoning": part, "reasoning_content": part}, {"content": part}, {"tool_calls": [call]}, {"tool_calls": [call]}][number])
        bodies = [{"id": id, "created": 1, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        bodies.append({"id": id, "created": 1, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        return [*(f"data: {json.dumps(body)}\n\n".encode() for body in bodies), b"data: [DONE]\n\n"]

    def read(events: list[bytes]) -> tuple[Any, ...]:
        found: dict[str, str] = {}
        ids: list[tuple[int, str]] = []
        for line in b"".join(events).split(b"\n"):
            for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
                delta = choice["delta"]
                parts = {name: delta.get(name, "") for name in ("content", "reasoning", "reasoning_content")} | {"end": choice["finish_reason"] or ""}
                for call in delta.get("tool_calls", ()):
                    ids += [(call["index"], call["id"])] if "id" in call else []
                    parts |= {f"{call['index']}{name}": call["function"].get(name, "") for name in ("name", "arguments")}
                for name, part in parts.items():
                    found[name] = found.get(name, "") + part
        return found, len(ids), len(set(ids))

    first, second = server("first"), server("other")
    cut = draw.randint(1, len(first) - 1)
    delivered = Delivered()
    for event in first[:cut]:
        delivered.add(event)
    repetition = delivered.repetition()
    whole = [*first[:cut], *(repetition.rest(event) for event in second)]
    found, ids, different = read(whole)
    assert (found, ids, different) == (read(first)[0], 2, 2)
    assert found["0arguments"] == texts[2] and found["reasoning"] == found["reasoning_content"] == texts[0]
    assert b"".join(whole).count(b"[DONE]") == 1


def test_other_weights_end_the_stream() -> None:
    draw = random.Random(0)
    words = [(f"w{i} ", 0.5) for i in range(10)]
    delivered = Delivered()
    for event in stream(draw, [words], "text", usage=False, id="a")[:3]:
        delivered.add(event)
    for other in (words[:1] + [("x ", 0.5)] * 9, words[:2]):
        with pytest.raises(Diverged, match="weights"):
            delivered.repetition().rest(b"".join(stream(draw, [other], "text", usage=False, id="b")))
    for broken in (b'data: {"error": {"message": "full"}}\n\n', b"data: {\n\n", b"data: []\n\n", b'data: {"choices": [{}]}\n\n'):
        with pytest.raises(Diverged):
            delivered.repetition().rest(broken)


def test_what_is_kept_of_a_stream_is_bounded() -> None:
    delivered = Delivered()
    for _ in range(5):
        delivered.add(b"x" * (MOST_BYTES // 4))
    assert not delivered.is_whole and not delivered._parts


def test_a_seed_is_added_to_the_bytes_of_a_request() -> None:
    body = b'{"prompt":  "\\u00e9}", "model":"m"} \n'
    assert seeded(body, 77) == b'{"prompt":  "\\u00e9}", "model":"m","seed":77}'
    assert json.loads(seeded(body, 77)) == {**json.loads(body), "seed": 77}


def test_a_stream_goes_on_at_the_other_backend(tmp_path: Path) -> None:
    with fault_backend("first", "m", "1") as first, fault_backend("second", "m", "1") as second, gateway(tmp_path, [first, second]) as running:
        ask = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 12}
        for mode in ("cut", "half_closed", "unfinished"):
            first.mode(mode)
            for _ in range(2):
                events = content(running.post("/v1/completions", ask).content)
                assert events[0] == {0: "".join(f"w{i} " for i in range(12))} and events[-1] == 1
        assert running.metric("resumed_streams_total") >= 3
        bodies = [json.loads(backend.stats()["last"]["body"]) for backend in (first, second)]
        assert all(body.pop("seed") >= 0 and body == ask for body in bodies)
        assert running.post("/v1/completions", {**ask, "seed": 5}).status_code == 200
        assert 5 in [json.loads(backend.stats()["last"]["body"])["seed"] for backend in (first, second)]
        first.mode("ok")
        second.mode("cut", word="v")
        # Those that begin at the first one are whole; the breakers are closed again after a while.
        texts: list[str] = []
        until(lambda: texts.append(running.post("/v1/completions", ask).text) or "other tokens" in texts[-1], "a stream that cannot go on")
        begun = content(texts[-1].partition("data: {\"error\"")[0].encode())[0]
        assert texts[-1].endswith("data: [DONE]\n\n") and begun[0].startswith("v0 ") and "w" not in begun[0]


def test_what_one_of_several_servers_at_an_address_fails_is_sent_there_again(tmp_path: Path) -> None:
    ask = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 12}
    whole = "".join(f"w{i} " for i in range(12))
    breaker = {"failures": 1, "open_s": 60.0, "max_open_s": 60.0}
    with fault_backend("all", "m", "1") as backend, fault_backend("one", "other", "1") as one:
        listed = [{"url": backend.url, "name": "all", "replicated": True}, {"url": one.url, "name": "one"}]
        with gateway(tmp_path, [], backends=listed, breaker=breaker) as running:
            for mode in ("cut", "half_closed", "unfinished", "reset", "500", "503"):
                backend.mode(mode, times=1)
                events = content(running.post("/v1/completions", ask).content)
                assert events[0] == {0: whole} and events[-1] == 1, mode
            for mode in ("truncated", "reset", "500", "502"):
                backend.mode(mode, times=2)
                answer = running.complete(max_tokens=12)
                assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == whole, mode
            assert running.metric("resumed_streams_total") == 3 and running.metric("backend_breaker_open", backend="all") == 0
            # What fails every time ends, and one server that fails is one that fails.
            backend.mode("500")
            before = backend.seen()
            assert running.complete().status_code == 500 and backend.seen() == before + 3
            one.mode("cut", times=1)
            assert "broke off" in running.post("/v1/completions", {**ask, "model": "other"}).text


@pytest.mark.full
def test_streams_of_killed_servers_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Real servers and engines: of two, one is killed while it streams, sampled at temperature 1 without a seed of the client's."""
    from server_process import server
    from tiny_model import make_model, make_tokenizer

    model = make_model(tmp_path / "model", make_tokenizer(tmp_path / "tokenizer"), 0)
    with ExitStack() as stack:
        servers = [stack.enter_context(server(model, tmp_path, "--served-model-name", "m")) for _ in range(2)]
        running = stack.enter_context(gateway(tmp_path, servers))
        until(lambda: running.metric("backend_ready") == 2, "both servers")
        fields = {"model": "m", "temperature": 1, "max_tokens": 400, "ignore_eos": True, "n": 2, "logprobs": 2, "return_token_ids": True}
        streams = []
        for number in range(6):
            request = {**fields, "prompt": f"the quick {number}", "stream": True, "stream_options": {"include_usage": True}, "seed": number}
            opened = stack.enter_context(httpx.Client(timeout=120)).stream("POST", running.url + "/v1/completions", json=request)
            response = stack.enter_context(opened)
            parts = response.iter_bytes()
            streams.append((request, next(parts), parts))
        os.kill(servers[0].process.pid, signal.SIGKILL)
        received = [content(begun + b"".join(parts)) for _, begun, parts in streams]
        assert running.metric("resumed_streams_total") >= 1
        for (request, _, _), got in zip(streams, received, strict=True):
            alone = content(servers[1].post("/v1/completions", request).content)
            assert got[:5] == alone[:5] and len(got[1][0, "token_ids"]) == 400 and len(got[5]) == 1
