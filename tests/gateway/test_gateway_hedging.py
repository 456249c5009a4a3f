"""Second attempts for short requests that take long."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import fault_backend, gateway, refusal
from http_processes import until

from tandem.config.gateway import BackendConfig, BreakerConfig
from tandem.config.hedge import HedgeConfig
from tandem.gateway.backend import Backend
from tandem.gateway.hedging import Hedges
from tandem.gateway.inference_request import InferenceRequest, read_request

ASK: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 5, "temperature": 0}


def asked(content: dict[str, Any], path: str = "/v1/completions", headers: list[tuple[bytes, bytes]] | None = None) -> InferenceRequest:
    return read_request("id", path, b"", headers or [], json.dumps(content).encode(), content, "127.0.0.1")


def backend(weights: str | None = None) -> Backend:
    made = Backend.make(BackendConfig("http://a:1"), BreakerConfig())
    made.weights = weights
    return made


CHAT = "/v1/chat/completions"
KEY = [(b"idempotency-key", b"k")]


@pytest.mark.parametrize(("content", "path", "headers", "weights", "is_hedged"), [
    ({"temperature": 0}, "/v1/completions", [], None, True),
    ({"temperature": 0.0, "max_tokens": 8}, CHAT, [], None, True),
    ({"seed": 7, "max_completion_tokens": 8}, CHAT, [], None, True),
    ({"max_tokens": 8}, CHAT, KEY, "0.1", True),
    # Another server would give another answer.
    ({"max_tokens": 8}, CHAT, [], "0.1", False),
    ({"max_tokens": 8}, CHAT, KEY, None, False),
    ({"temperature": 0.7, "max_tokens": 8}, CHAT, [], "0.1", False),
    # Long, without a limit, or streamed.
    ({"temperature": 0, "max_tokens": 65}, CHAT, [], None, False),
    ({"temperature": 0, "max_tokens": 8, "n": 9}, CHAT, [], None, False),
    ({"temperature": 0}, CHAT, [], None, False),
    ({"temperature": 0, "max_tokens": 8, "stream": True}, CHAT, [], None, False),
])  # fmt: skip
def test_only_short_requests_with_one_answer_are_asked_for_twice(
    content: dict[str, Any], path: str, headers: list[tuple[bytes, bytes]], weights: str | None, is_hedged: bool
) -> None:
    request = asked({"model": "m", "prompt": "x", **content}, path, headers)
    assert Hedges(HedgeConfig(share=0.1, after_s=0.5)).delay_s(request, backend(weights)) == (0.5 if is_hedged else None)
    assert Hedges(HedgeConfig()).delay_s(request, backend(weights)) is None


def test_the_delay_is_the_95th_percentile_and_the_share_is_kept() -> None:
    hedges, request, one = Hedges(HedgeConfig(share=0.1)), asked(ASK), backend()
    for number in range(19):
        hedges.note("m", 1 + number)
    assert hedges.delay_s(request, one) == math.inf, "too few to know the tail"
    for number in range(19, 100):
        hedges.note("m", 1 + number)
    hedges.note("other", 1000)
    assert hedges.delay_s(request, one) == 95
    for number in range(200):
        hedges.note("m", 1001 + number)
    assert hedges.delay_s(request, one) == 1190, "the newest 200"
    made = 0
    for _ in range(1000):
        hedges.delay_s(request, one)
        made += sum(hedges.take() for _ in range(3))
    assert 90 <= made <= 101


def test_the_first_answer_is_the_clients_and_is_billed_once(tmp_path: Path) -> None:
    limits = {"other_tenants": {"limits": {"tokens_per_day": 10_000}}}
    with fault_backend("first") as first, fault_backend("second") as second, contextlib.ExitStack() as stack:
        running = stack.enter_context(gateway(tmp_path, [first, second], hedge={"share": 0.5, "after_s": 0.1}, **limits))
        running.wait_ready(first, second)
        first.mode("ok", delay_s=0.4)
        answers = []
        while running.metric("hedges_total", outcome="won") < 1:
            answers.append(running.post("/v1/completions", ASK))
        assert {answer.status_code for answer in answers} == {200} and len({answer.text for answer in answers}) == 1
        # The attempt that lost is ended at its backend.
        until(lambda: first.seen("aborted") == 1, "the slow backend to learn that nobody waits")
        made = running.metric("hedges_total")
        assert made <= len(answers) / 2 + 1 and first.seen() + second.seen() == len(answers) + made
        remaining = int(answers[-1].headers["x-ratelimit-remaining-tokens"])
        # The last one had reserved 1 for its prompt, by its bytes, and 5; those before have cost 3 and 5 each.
        assert remaining == 10_000 - 8 * (len(answers) - 1) - (len(json.dumps(ASK, separators=(",", ":"))) // 4 + 1) - 5
        assert running.metric("retries_total") == 0 and running.metric("requests_total", code="200") == len(answers)


@pytest.mark.full
def test_a_client_that_leaves_ends_both_attempts_and_an_attempt_that_fails_leaves_the_other(tmp_path: Path) -> None:
    hedge = {"share": 0.5, "after_s": 0.1}
    with fault_backend("first") as first, fault_backend("second") as second, gateway(tmp_path, [first, second], hedge=hedge) as running:
        running.wait_ready(first, second)
        # Streams and requests with many answers are asked for once.
        first.mode("ok", delay_s=0.15)
        for other in ({"stream": True}, {"temperature": 1}, {"max_tokens": 65}):
            assert [running.post("/v1/completions", {**ASK, **other}).status_code for _ in range(2)] == [200, 200]
        assert running.metric("hedges_total") == 0

        # A client that leaves ends both.
        for each in (first, second):
            each.mode("deaf")
        aborted = first.seen("aborted"), second.seen("aborted")
        until(lambda: leaves(running.url) is None and second.seen("aborted") > aborted[1]
              and first.seen("aborted") > aborted[0], "both to learn that the client has left")  # fmt: skip
        running.wait_idle()

        # Where one fails, the other's answer is waited for; where both do, it is an error.
        first.mode("reset")
        second.mode("ok", delay_s=0.3)
        assert [running.post("/v1/completions", ASK).status_code for _ in range(4)] == [200] * 4
        second.mode("reset")
        until(lambda: running.post("/v1/completions", ASK).status_code in (502, 503), "an error")
        running.wait_idle()


def leaves(url: str) -> None:
    """Asks, and leaves before an answer."""
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=ASK, timeout=0.5, verify=False)


@pytest.mark.parametrize(("hedge", "line"), [
    ({"share": 0.6}, "'hedge.share' is 0.6; it must be from 0 to 0.5"),
    ({"share": -1}, "'hedge.share' is -1"),
    ({"share": 0.1, "after_s": -1}, "'hedge.after_s' is -1"),
    ({"share": 0.1, "max_tokens": 0}, "'hedge.max_tokens' is 0"),
    ({"after_s": 1}, "'hedge.after_s' is 1.0, which is not read: hedge.share is 0"),
])  # fmt: skip
def test_settings_of_hedging_that_cannot_work_are_one_line(hedge: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refusal({"hedge": hedge}, tmp_path, capsys)


