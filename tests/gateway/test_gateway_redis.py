"""Limits in a real Redis, which the tests start, beside the embedded ones."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway_process import FaultBackend, fault_backend, gateway, until
from redis_server import Redis, needs_redis

from tandem.config.gateway import LimitConfig
from tandem.gateway import redis_limits
from tandem.gateway.keys import new_key, write_keys
from tandem.gateway.rate_limit import EmbeddedLimits, Refusal, shares_of
from tandem.gateway.redis_limits import RedisLimits

pytestmark = needs_redis


def with_stores(redis: Redis, count: int, work: Callable[..., Awaitable[None]], said: list[str] | None = None) -> None:
    """Runs ``work`` with the stores of ``count`` gateways."""

    async def run() -> None:
        stores = [RedisLimits(redis.url, "test", 5.0, (said if said is not None else []).append) for _ in range(count)]
        try:
            await work(*stores)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(run())


def test_redis_counts_as_the_embedded_store_does(redis: Redis) -> None:
    draw = random.Random(0)

    async def compare(shared: RedisLimits) -> None:
        embedded, open_ids = EmbeddedLimits(), {}
        for number in range(300):
            if open_ids and draw.random() < 0.45:
                id = draw.choice(list(open_ids))
                shares = open_ids.pop(id)
                tokens = draw.randint(0, 30)
                prompt = draw.randint(0, tokens)
                await shared.settle(id, shares, tokens, 1, prompt)
                await embedded.settle(id, shares, tokens, 1, prompt)
                continue
            limits = LimitConfig(concurrent=6, tokens_per_day=4000, requests_per_day=200, input_tokens_per_day=2000, output_tokens_per_day=1900)
            tokens = draw.randint(1, 40)
            shares = [*shares_of("tenant t", limits, tokens, draw.randint(0, tokens)), *shares_of(f"key {number % 3}", LimitConfig(tokens_per_day=900), 30)]
            answers = [await store.reserve(str(number), shares) for store in (shared, embedded)]
            if isinstance(answers[0], Refusal):
                assert isinstance(answers[1], Refusal) and answers[0].share == answers[1].share
                assert answers[0].retry_after_s == pytest.approx(answers[1].retry_after_s, abs=60)
            else:
                assert answers[0] == answers[1]
                open_ids[str(number)] = shares

    with_stores(redis, 1, compare)


def test_gateways_share_one_budget_whatever_they_ask_at_once(redis: Redis) -> None:
    async def race(*stores: RedisLimits) -> None:
        shares = shares_of("tenant t", LimitConfig(tokens_per_day=50 * 13), 13)
        answers = await asyncio.gather(*(stores[number % 4].reserve(str(number), shares) for number in range(200)))
        assert sum(not isinstance(answer, Refusal) for answer in answers) == 50

    with_stores(redis, 4, race)


@pytest.mark.full
def test_the_reservations_of_a_gateway_that_dies_end_and_those_of_one_that_lives_are_renewed(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_limits, "RESERVED_S", 2)
    monkeypatch.setattr(redis_limits, "_RENEW_S", 0.2)

    async def work(dies: RedisLimits, lives: RedisLimits) -> None:
        shares = shares_of("tenant t", LimitConfig(concurrent=2), 1)
        assert await dies.reserve("a", shares) == [1] and await lives.reserve("b", shares) == [0]
        keeping = asyncio.create_task(lives.keep())
        assert isinstance(await lives.reserve("c", shares), Refusal)
        while isinstance(left := await lives.reserve("c", shares), Refusal):
            await asyncio.sleep(0.1)
        assert left == [0], "one place is free again, not both"
        await asyncio.sleep(2.5)
        assert isinstance(await lives.reserve("d", shares), Refusal)
        await lives.settle("b", shares, 0, 1)
        assert await lives.reserve("d", shares) == [0]
        keeping.cancel()

    with_stores(redis, 2, work)


def test_while_redis_is_away_each_gateway_counts_alone_and_settles_afterwards(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_limits, "_AWAY_S", 0.05)
    said: list[str] = []

    async def work(store: RedisLimits) -> None:
        shares = shares_of("tenant t", LimitConfig(tokens_per_day=100), 40)
        assert await store.reserve("before", shares) == [60]
        redis.kill()
        await store.settle("before", shares, 30, 1)
        assert await store.reserve("away", shares) == [60], "a count of its own"
        await store.settle("away", shares, 40, 1)
        redis.start()
        await asyncio.sleep(0.1)
        await store.flush()
        assert await store.reserve("after", shares) == [100 - 30 - 40], "Redis has kept its counts, and what ended while it was away"

    with_stores(redis, 1, work, said)
    assert len(said) == 2 and "does not answer" in said[0] and "answers again" in said[1]


@pytest.mark.full
def test_two_gateways_before_one_redis_spend_exactly_one_budget(redis: Redis, tmp_path: Path) -> None:
    key, record = new_key("t")
    write_keys(tmp_path / "keys.json", {record.id: record})
    settings = {
        "keys_file": str(tmp_path / "keys.json"), "tenants": {"t": {"limits": {"tokens_per_day": 50 * 13}}}, "redis": {"url": redis.url, "timeout_s": 30},
    }  # fmt: skip

    def ask(door: FaultBackend) -> int:
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 10}
        return door.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status_code

    with fault_backend("only") as backend, gateway(tmp_path, [backend], **settings) as one, gateway(tmp_path, [backend], **settings) as two:
        with ThreadPoolExecutor(40) as threads:
            statuses = list(threads.map(ask, [one, two] * 100))
        assert sorted(statuses) == [200] * 50 + [429] * 150 and backend.seen() == 50
        redis.kill()
        assert ask(one) == 200 and "counts limits alone" in one.log.read_text()
        redis.start()
        until(lambda: ask(one) == 429, "Redis to count again")
