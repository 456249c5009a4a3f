"""Keys, limits and the queue of a gateway process."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gateway_process import FaultBackend, Gateway, fault_backend, gateway, until

from tandem.config.gateway import LimitConfig
from tandem.gateway.keys import new_key, read_keys, write_keys

Door = tuple[Gateway, FaultBackend, dict[str, str], Path]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A gateway with keys before one backend that has two requests at once. The tenants and their keys: ``flood`` and ``calm``, ``metered`` with a budget
    of 50 requests of 13 tokens, ``narrow`` with a key for another model."""
    folder = tmp_path_factory.mktemp("door")
    made = {name: new_key(name) for name in ("flood", "calm", "metered")}
    made["narrow"] = new_key("narrow", models=("other",), limits=LimitConfig(requests_per_day=3))
    write_keys(folder / "keys.json", {record.id: record for _, record in made.values()})
    settings = {
        "keys_file": str(folder / "keys.json"), "queue": {"max_waiting": 300, "max_waiting_per_tenant": 220, "max_wait_s": 100},
        "tenants": {"metered": {"limits": {"tokens_per_day": 50 * 13}}},
    }  # fmt: skip
    with fault_backend("only", "m,other") as backend, gateway(folder, [backend], **settings) as running:
        yield running, backend, {name: key for name, (key, _) in made.items()}, folder


def ask(door: Door, who: str, **fields: object) -> httpx.Response:
    running, _, keys, _ = door
    body = {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 10, **fields}
    return running.post("/v1/completions", body, headers={"Authorization": f"Bearer {keys.get(who, who)}"})


def test_a_request_needs_a_key_and_the_backend_never_sees_it(door: Door) -> None:
    running, backend, keys, _ = door
    assert running.complete().status_code == ask(door, "tk-wrong-key").status_code == 401
    assert ask(door, "calm").status_code == 200
    assert "authorization" not in backend.stats()["last"]["headers"]
    assert running.get("/v1/models").status_code == running.get("/readiness").status_code == 200
    assert not any(key in running.log.read_text() for key in keys.values())


def test_a_key_is_held_to_its_models_and_limits_and_headers_say_what_is_left(door: Door) -> None:
    refused = ask(door, "narrow")
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "model_not_allowed"
    answers = [ask(door, "narrow", model="other") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[:3]] == ["2", "1", "0"]
    assert 0 < int(answers[3].headers["retry-after"]) <= 86_400 and answers[3].json()["error"]["code"] == "rate_limit_exceeded"


def test_two_hundred_requests_at_once_spend_exactly_a_budget_of_fifty(door: Door) -> None:
    _, backend, _, _ = door
    before = backend.seen()
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(lambda _: ask(door, "metered", prompt=[1, 2, 3]), range(200)))
    assert sorted(answer.status_code for answer in answers) == [200] * 50 + [429] * 150
    assert backend.seen() - before == 50
    assert sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200) == 50 * 13


def test_one_tenants_flood_does_not_delay_anothers_requests(door: Door) -> None:
    """By the order of service, not by the clock: each request of the calm tenant is answered after few of the flood's."""
    running, backend, _, _ = door
    backend.mode("ok", delay_s=0.01)
    flood = 60
    with ThreadPoolExecutor(flood) as threads:
        asked = [threads.submit(ask, door, "flood", max_tokens=100) for _ in range(flood)]
        until(lambda: running.metric("waiting_requests") > 0 or all(one.done() for one in asked), "the queue")
        overtaken = []
        for _ in range(3):
            before = sum(one.done() for one in asked)
            assert ask(door, "calm", max_tokens=1).status_code == 200
            overtaken.append(sum(one.done() for one in asked) - before)
        assert max(overtaken) < flood / 2, "in the order of arrival the first would have waited for all of them"
        assert all(one.result().status_code == 200 for one in asked)
    backend.mode("ok")
    running.wait_idle()


def test_a_revoked_key_ends(door: Door) -> None:
    _, _, keys, folder = door
    records = read_keys(folder / "keys.json")
    del records[keys["calm"].split("-")[1]]
    write_keys(folder / "keys.json", records)
    until(lambda: ask(door, "calm").status_code == 401, "the key file to be read again")
    assert ask(door, "flood").status_code == 200


def test_the_queue_is_bounded_and_its_waits_end(tmp_path: Path) -> None:
    with fault_backend("only") as backend:
        settings = {"backends": [{"url": backend.url, "max_requests": 1}], "queue": {"max_waiting": 2, "max_wait_s": 30}}
        with gateway(tmp_path, [backend], **settings) as running, ThreadPoolExecutor(3) as threads:
            backend.mode("deaf")
            host, port = running.url.removeprefix("http://").split(":")
            content = b'{"model": "m", "prompt": "x"}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()

            def client() -> socket.socket:
                one = socket.create_connection((host, int(port)), timeout=60)
                one.sendall(head + content)
                return one

            first = client()
            until(lambda: backend.stats()["running"] == 1, "the first request")
            second = client()
            until(lambda: running.metric("waiting_requests") == 1, "the second to wait")
            late = threads.submit(running.complete)
            until(lambda: running.metric("waiting_requests") == 2, "the third to wait")
            full = running.complete()
            assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full" and int(full.headers["retry-after"]) >= 1
            assert backend.seen() == 1, "those that wait are not at the backend"
            second.close()
            until(lambda: running.metric("waiting_requests") == 1, "the client's leave to empty its place")
            hurried = running.post("/v1/completions", {"model": "m", "prompt": "x"}, headers={"X-Request-Timeout": "0.2"})
            assert hurried.status_code == 429 and "has waited 0.2 s" in hurried.json()["error"]["message"]
            assert running.post("/v1/completions", {"model": "m"}, headers={"X-Request-Timeout": "soon"}).status_code == 400
            backend.mode("ok")
            first.close()
            assert late.result().status_code == 200, "its turn came when the first had left"
            running.wait_idle()
