"""The breaker, the retry budget and the headers, without a network."""

import pytest
from routing_cases import Clock, backends, in_task

from tandem.config.gateway import BreakerConfig, GatewayConfig, RetryConfig
from tandem.config.load import build
from tandem.gateway.breaker import Breaker, Outcome
from tandem.gateway.headers import end_to_end, to_backend
from tandem.gateway.inference_request import read_request
from tandem.gateway.retry_budget import RetryBudget
from tandem.gateway.server_sent_events import EventParts, whole_events
from tandem.serving.errors import ApiError
from tandem.types import UserError


def breaker(**settings: float) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(build(BreakerConfig, {"failures": 3, "window": 8, "open_s": 2.0, "max_open_s": 10.0, **settings}), clock), clock


def attempt(one: Breaker, outcome: Outcome) -> None:
    one.report(one.take(), outcome)


def test_failures_in_a_row_open_the_breaker_and_errors_of_clients_do_not() -> None:
    one, _ = breaker(window=20)
    for outcome in (Outcome.FAILURE, Outcome.FAILURE, Outcome.SUCCESS, Outcome.FAILURE, Outcome.BUSY, Outcome.UNKNOWN):
        attempt(one, outcome)
    assert one.state == "closed", "a success began the row anew, a full queue says nothing"
    for _ in range(50):
        attempt(one, Outcome.BUSY)
    attempt(one, Outcome.FAILURE)
    assert one.state == "closed"
    attempt(one, Outcome.FAILURE)
    assert one.state == "open" and not one.allows() and one.opens_in_s == 2.0


def test_a_share_of_failures_opens_it_though_none_follow_each_other() -> None:
    one, _ = breaker()
    for _ in range(3):
        attempt(one, Outcome.SUCCESS)
        attempt(one, Outcome.FAILURE)
    assert one.state == "closed"
    attempt(one, Outcome.SUCCESS)
    attempt(one, Outcome.FAILURE)
    assert one.state == "open", "4 of 8"


def test_half_open_takes_one_at_a_time_and_closes_after_its_successes() -> None:
    one, clock = breaker()
    for _ in range(3):
        attempt(one, Outcome.FAILURE)
    clock.now += 2.0
    assert one.state == "half_open" and one.allows()
    trial = one.take()
    assert not one.allows()
    one.report(trial, Outcome.SUCCESS)
    assert one.state == "half_open" and one.allows()
    attempt(one, Outcome.BUSY)
    assert one.state == "closed", "that it takes no more is an answer"
    attempt(one, Outcome.FAILURE)
    assert one.state == "closed"


def test_a_trial_whose_client_leaves_makes_room_for_the_next() -> None:
    one, clock = breaker()
    for _ in range(3):
        attempt(one, Outcome.FAILURE)
    clock.now += 2.0
    attempt(one, Outcome.UNKNOWN)
    assert one.allows() and one.state == "half_open"


def test_failed_trials_double_the_time_up_to_the_longest_and_late_answers_count_for_nothing() -> None:
    one, clock = breaker()
    late = [one.take() for _ in range(6)]
    for given in late[:3]:
        one.report(given, Outcome.FAILURE)
    waits = []
    for _ in range(5):
        waits.append(one.opens_in_s)
        one.report(late[3], Outcome.FAILURE)
        one.report(late[4], Outcome.SUCCESS)
        assert one.opens_in_s == waits[-1] and one.state == "open"
        clock.now += waits[-1]
        attempt(one, Outcome.FAILURE)
    assert waits == [2.0, 4.0, 8.0, 10.0, 10.0]
    one.reset()
    assert one.state == "closed" and one.allows()


def test_work_that_is_done_or_released_leaves_the_load_once() -> None:
    def run() -> None:
        (one,) = backends(1)
        first, second = one.take(100), one.take(10)
        first.done(30)
        assert one.outstanding_tokens == 80
        first.done(500)
        assert one.outstanding_tokens == 10, "no more than it had"
        for _ in range(3):
            first.release()
            second.release()
        assert one.outstanding_tokens == 0 and not one.attempts

    in_task(run)


def test_the_budget_bounds_retries_to_a_share_of_requests() -> None:
    clock = Clock()
    budget = RetryBudget(RetryConfig(budget=0.2, reserve=4), clock)
    retries = 0
    for _ in range(1000):
        budget.request()
        retries += budget.take()
    assert retries == pytest.approx(0.2 * 1000 + 4, abs=2)
    assert not budget.take()
    clock.now += 10
    assert [budget.take() for _ in range(5)] == [True] * 4 + [False], "the reserve is back after ten seconds"
    assert not RetryBudget(RetryConfig(budget=0, reserve=0), clock).take()


def test_headers_of_the_connection_end_at_the_gateway() -> None:
    headers = [(b"Connection", b"close, X-Secret"), (b"x-secret", b"1"), (b"Transfer-Encoding", b"chunked"), (b"TE", b"trailers"), (b"X-Kept", b"2")]
    assert end_to_end(headers) == [(b"x-kept", b"2")]
    request = [(b"host", b"a"), (b"content-length", b"3"), (b"authorization", b"Bearer client"), (b"x-forwarded-for", b"10.0.0.1"), (b"accept", b"*/*")]
    passed = to_backend(request, authorization=None, client="10.0.0.2")
    assert passed == [(b"authorization", b"Bearer client"), (b"accept", b"*/*"), (b"x-forwarded-for", b"10.0.0.1, 10.0.0.2")]
    assert (b"authorization", b"Bearer own") in to_backend(request, authorization="Bearer own", client="")
    assert not [value for name, value in to_backend(request, authorization="", client="") if name == b"authorization"]


@pytest.mark.parametrize("content, work", [
    ({"prompt": [1, 2, 3], "max_tokens": 5}, (3, 5)),
    ({"prompt": [[1, 2], [3]], "max_tokens": 5, "n": 2}, (3, 20)),
    ({"prompt": "abc"}, (26, 16)),
    ({"prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 7}}, (2, 7)),
    ({"prompt": "abc", "max_tokens": "many", "n": -1}, (26, 16)),
])  # fmt: skip
def test_the_work_of_a_request_is_estimated(content: object, work: tuple[int, int]) -> None:
    request = read_request("id", "/v1/completions", b"", [], b"x" * 100, content, "")
    assert (request.prompt_tokens, request.max_tokens) == work


@pytest.mark.parametrize("content", [[], "text", {"model": 1}, {"stream": "yes"}])
def test_a_body_whose_model_cannot_be_read_is_refused(content: object) -> None:
    with pytest.raises(ApiError) as caught:
        read_request("id", "/v1/completions", b"", [], b"", content, "")
    assert caught.value.status == 400


def test_events_are_passed_on_whole() -> None:
    stream = b"data: {\"a\": 1}\n\ndata: {\"b\": 2}\r\n\r\ndata: [DONE]\n\n"
    for cut in range(len(stream) + 1):
        whole, held = whole_events(stream[:cut])
        assert whole + held == stream[:cut] and (not whole or whole.endswith((b"\n\n", b"\r\n\r\n")))
        after, rest = whole_events(held + stream[cut:])
        assert whole + after == stream and rest == b""
    for size in range(1, len(stream) + 1):
        parts = EventParts()
        passed = [parts.add(stream[i : i + size]) for i in range(0, len(stream), size)]
        assert b"".join(passed) == stream and parts.size == 0
        assert all(not each or each.endswith((b"\n\n", b"\r\n\r\n")) for each in passed)
    parts = EventParts()
    assert [parts.add(b"x" * 10) for _ in range(5)] == [b""] * 5 and parts.size == 50
    assert parts.add(b"\n\ny") == b"x" * 50 + b"\n\n" and parts.size == 1


@pytest.mark.parametrize("settings, says", [
    ({}, "'backends' has 0 entries"),
    ({"backends": []}, "'backends' has 0 entries"),
    ({"backends": [{"url": "http://a:1"}], "balanse": "x"}, "did you mean 'balance'"),
    ({"backends": [{"url": "http://a:1"}], "balance": "least"}, "must be one of least_tokens, power_of_two, round_robin, consistent_hash"),
    ({"backends": [{"url": "http://a:1"}, {"url": "http://a:1"}]}, "two backends have the name 'a:1'"),
    ({"backends": [{"url": "a:1"}]}, "write http://HOST:PORT"),
    ({"backends": [{"url": "http://a:1/v1"}]}, "leave out '/v1'"),
    ({"backends": [{"url": "http://u:p@a:1"}]}, "password"),
    ({"backends": [{"url": "http://a:1", "weight": 0}]}, "'backends.weight' of a:1 is 0"),
    ({"backends": [{"url": "http://a:1", "name": "a\nb"}]}, "can be printed"),
    ({"backends": [{"url": "http://a:1", "probe": "health"}]}, "must begin with '/'"),
    ({"backends": [{"url": "http://a:1"}], "timeouts": {"connect_s": 0}}, "'timeouts.connect_s' is 0"),
    ({"backends": [{"url": "http://a:1"}], "breaker": {"successes": 0}}, "'breaker.successes' is 0"),
    ({"backends": [{"url": "http://a:1"}], "breaker": {"failure_share": 2}}, "'breaker.failure_share' is 2"),
    ({"backends": [{"url": "http://a:1"}], "retry": {"attempts": 0}}, "'retry.attempts' is 0"),
    ({"backends": [{"url": "http://a:1"}], "retry": {"budget": -1}}, "'retry.budget' is -1"),
    ({"backends": [{"url": "http://a:1"}], "max_body_mib": 0}, "'max_body_mib' is 0"),
    ({"backends": [{"url": "http://a:1"}], "port": 70000}, "'port' is 70000"),
])  # fmt: skip
def test_settings_that_cannot_work_are_one_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build(GatewayConfig, settings)
    assert says in str(caught.value) and "\n" not in str(caught.value)
