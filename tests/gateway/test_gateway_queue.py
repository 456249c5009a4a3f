"""The queue: room in KV caches, deadlines, priorities and classes."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gateway_process import fault_backend, gateway, until
from routing_cases import Clock, backends, in_task, request

from tandem.config.gateway import GatewayConfig, QueueConfig, TenantConfig
from tandem.gateway.admission import Admission
from tandem.gateway.backend import Backend, EngineState
from tandem.gateway.fair_queue import FairQueue
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.pool import Pool
from tandem.gateway.routing.filters import in_time
from tandem.gateway.speed import Speed
from tandem.serving.errors import ApiError

Turn = Callable[[InferenceRequest], Awaitable[None]]


def free(tokens: int, waiting_tokens: int = 0) -> EngineState:
    return EngineState(1000, tokens, int(waiting_tokens > 0), waiting_tokens)


def with_timeout(seconds: float, tokens: int = 100) -> InferenceRequest:
    return request([1] * tokens, headers=[(b"x-request-timeout", str(seconds).encode())])


def test_the_lowest_priority_of_a_tenant_is_first_and_lower_classes_are_before_higher() -> None:
    queue: FairQueue[str] = FairQueue(classes={"batch": 5, "urgent": -1})
    for name, priority in (("a", 3), ("b", 0), ("c", 3), ("d", -7)):
        queue.push("plain", name, priority)
    queue.push("batch", "e", -100)
    queue.push("urgent", "f", 100)
    assert queue.ahead("batch") == 1 + 4 + 1 and queue.ahead("urgent") == 1 and queue.ahead("plain") == 4 + 1
    queue.charge("urgent", 10**9)
    order = []
    while len(queue):
        following = queue.next()
        order.append(queue.pop())
        assert following == order[-1]
    assert order == [("urgent", "f"), ("plain", "d"), ("plain", "b"), ("plain", "a"), ("plain", "c"), ("batch", "e")]


def test_a_cache_has_room_for_what_is_free_less_what_was_sent_since() -> None:
    def run() -> None:
        (one,) = backends(1)
        assert one.has_cache_for(10**9), "a server that says nothing takes what it is given"
        one.said(free(0))
        assert one.has_cache_for(10**9), "one that does nothing takes any request"
        first = one.take(100)
        one.said(free(300, waiting_tokens=50))
        assert one.has_cache_for(250) and not one.has_cache_for(251)
        second = one.take(200)
        assert one.has_cache_for(50) and not one.has_cache_for(51)
        first.release()
        assert not one.has_cache_for(51), "what it held when the server spoke is not free before it speaks again"
        second.release()
        one.take(1)
        assert one.has_cache_for(249) and not one.has_cache_for(250)

    in_task(run)


def test_the_speed_is_that_of_the_newest_answers_and_is_forgotten() -> None:
    clock = Clock()
    speed = Speed(clock)
    assert speed.seconds(1000) == 0
    speed.note(1000, 0.5)
    assert speed.seconds(1000) == pytest.approx(0.5)
    for _ in range(50):
        speed.note(1000, 2.0)
    assert speed.seconds(1000) == pytest.approx(2.0, rel=0.01)
    clock.now += 10.1
    assert speed.seconds(1000) == 0, "a slow time is not for ever"


def test_a_backend_that_would_be_late_is_left_out_if_there_is_another() -> None:
    def run() -> None:
        slow, fast = pool = backends(1, 1)
        slow.speed.note(100, 1.0)
        fast.speed.note(1000, 1.0)
        slow.take(400)
        assert slow.first_byte_s(100) == pytest.approx(5.0) and fast.first_byte_s(100) == pytest.approx(0.1)
        assert in_time(with_timeout(4.9), pool) == [fast] and in_time(with_timeout(5.1), pool) == pool
        assert in_time(with_timeout(0.05), pool) == pool and in_time(request(), pool) == pool

    in_task(run)


def admission(made: list[Backend], queue: QueueConfig | None = None, **fields: Any) -> tuple[Admission, Pool]:
    config = GatewayConfig(tuple(each.config for each in made), queue=queue or QueueConfig(), **fields)
    pool = Pool(config, made)
    return Admission(config, pool), pool


def test_requests_wait_for_room_in_the_cache_and_nobody_overtakes_a_long_prompt() -> None:
    async def run() -> None:
        made = backends(1)
        admit, pool = admission(made)
        done: list[str] = []
        ends = {name: asyncio.Event() for name in ("running", "long", "short")}

        async def ask(name: str, tokens: int) -> None:
            asked = request([1] * tokens)
            async with admit(asked):
                backend = pool.choose(asked)
                assert backend is not None
                attempt = backend.take(tokens)
                done.append(name)
                await ends[name].wait()
                attempt.release()

        tasks = [asyncio.create_task(ask("running", 100))]
        await asyncio.sleep(0)
        made[0].said(free(400))
        tasks.append(asyncio.create_task(ask("long", 500)))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("short", 10)))
        for _ in range(5):
            await asyncio.sleep(0)
            admit.wake()
        assert done == ["running"] and admit.waiting == {"m": 2} and admit.waiting_tokens == {"m": 510}
        made[0].said(free(505))
        admit.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        assert done == ["running", "long"], "505 tokens are room for the long one alone, though none of them is taken yet"
        made[0].said(free(10))
        admit.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        assert done == ["running", "long", "short"]
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks)
        assert not made[0].attempts and made[0].unseen_tokens == 0

    asyncio.run(run())


def test_without_follow_cache_nothing_waits_for_it() -> None:
    async def run() -> None:
        made = backends(1)
        admit, _ = admission(made, QueueConfig(follow_cache=False))
        made[0].take(1)
        made[0].said(free(0))
        async with admit(request([1] * 500)):
            assert admit.waiting == {"m": 0}

    asyncio.run(run())


def test_what_cannot_be_answered_in_time_is_refused_at_once_with_the_time_that_it_lacks() -> None:
    async def run() -> None:
        made = backends(1, max_requests=1)
        admit, _ = admission(made)
        made[0].speed.note(100, 1.0)
        made[0].take(900)
        with pytest.raises(ApiError) as caught:
            async with admit(with_timeout(4.0)):
                pass
        assert caught.value.status == 429 and caught.value.code == "deadline_exceeded" and caught.value.headers["Retry-After"] == "6"
        assert admit.waiting == {"m": 0}
        free_one = backends(1)
        admit, _ = admission(free_one)
        free_one[0].speed.note(100, 1.0)
        free_one[0].take(200)
        for seconds, is_admitted in ((2.9, False), (3.1, True)):
            try:
                async with admit(with_timeout(seconds)):
                    assert is_admitted
            except ApiError as error:
                assert not is_admitted and error.headers["Retry-After"] == "1"

    asyncio.run(run())


def test_classes_of_tenants_are_read_from_the_file() -> None:
    async def run() -> None:
        made = backends(1, max_requests=1)
        admit, _ = admission(made, tenants={"batch": TenantConfig(priority=1)})
        order: list[str] = []

        async def ask(tenant: str) -> None:
            async with admit(request("x", tenant=tenant)):
                held = made[0].take(1)
                order.append(tenant)
                await asyncio.sleep(0)
                held.release()

        held = made[0].take(1)
        tasks = [asyncio.create_task(ask(tenant)) for tenant in ("batch", "batch", "one", "two")]
        await asyncio.sleep(0)
        held.release()
        admit.wake()
        await asyncio.gather(*tasks)
        assert sorted(order[:2]) == ["one", "two"] and order[2:] == ["batch", "batch"]

    asyncio.run(run())


def test_a_gateway_waits_for_the_cache_of_its_server_and_ends_what_is_late(tmp_path: Path) -> None:
    state = {"block_size": 16, "blocks": 10, "free_blocks": 1, "running": 1, "waiting": 0, "waiting_tokens": 0}
    with ThreadPoolExecutor(2) as threads, fault_backend("only", "m", "1") as backend, \
            gateway(tmp_path, [backend], probes={"interval_s": 0.1, "state_s": 0.05}) as running:  # fmt: skip
        backend.mode("deaf", kv_cache=state)
        until(lambda: running.metric("free_cache_tokens") == 16, "what the server says")
        late = running.post("/v1/completions", {"model": "m", "prompt": [1] * 16}, headers={"X-Request-Timeout": "0.3"})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        assert running.metric("refused_total", reason="deadline_exceeded") == 1 and running.metric("attempts_total", outcome="failure") == 0
        until(lambda: backend.stats()["running"] == 0, "the backend to learn it")
        hanging = threads.submit(running.post, "/v1/completions", {"model": "m", "prompt": [1] * 16})
        until(lambda: backend.stats()["running"] == 1, "the first request")
        waiting = threads.submit(running.post, "/v1/completions", {"model": "m", "prompt": [1] * 40})
        until(lambda: running.metric("waiting_tokens") == 40, "the second to wait")
        assert backend.seen() == 2 and running.metric("waiting_requests") == 1
        backend.mode("ok", kv_cache={**state, "free_blocks": 10})
        assert waiting.result().status_code == 200
        assert running.metric("retries_total") == 0 and running.metric("queue_wait_seconds_count") == 3
        backend.process.kill()
        assert hanging.result().status_code == 502
        running.wait_idle()
