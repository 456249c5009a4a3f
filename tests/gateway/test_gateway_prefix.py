"""Routing by prefix: what the index knows, forgets and weighs against load."""

import asyncio
import random
from typing import Any

import pytest
from routing_cases import backends, in_task, request

from tandem.config.gateway import GatewayConfig
from tandem.config.routing import RouterConfig
from tandem.gateway.backend import Backend
from tandem.gateway.pool import Pool
from tandem.gateway.routing.prefix_index import BLOCK_TOKENS, MOST_BLOCKS, PrefixIndex, read_prefix
from tandem.gateway.routing.router import Router


def settings(made: list[Backend], **fields: Any) -> GatewayConfig:
    return GatewayConfig(tuple(each.config for each in made), **fields)


def blocks_of(content: dict[str, Any]) -> tuple[int, ...]:
    return read_prefix(content)[0]


def common(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Returns how many blocks two prompts share."""
    pairs = list(zip(blocks_of(one), blocks_of(other), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_prompts_share_blocks_as_far_as_they_begin_alike() -> None:
    text = "".join(random.Random(0).choices("abcdefgh ", k=4000))
    assert common({"prompt": text + "x" * 600}, {"prompt": text + "y" * 600}) == 4000 // 256
    assert common({"prompt": "z" + text}, {"prompt": text}) == 0, "a block counts only after all before it"
    ids = list(range(640))
    assert common({"prompt": [*ids, 1, 2]}, {"prompt": [*ids, *range(64)]}) == 10
    assert common({"prompt": [*ids[:320], 7, *ids[321:]]}, {"prompt": ids}) == 5
    system = {"role": "system", "content": text}
    turns = [system, {"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b" * 300}]
    assert common({"messages": turns}, {"messages": [*turns, {"role": "user", "content": "c" * 300}]}) >= 17
    for other in ({"model": "b"}, {"cache_salt": "s"}):
        assert common({"prompt": text, "model": "a"}, {"prompt": text, "model": "a", **other}) == 0
    assert blocks_of({"prompt": ["a" * 999]}) == blocks_of({"messages": 3}) == blocks_of({}) == ()
    assert len(blocks_of({"prompt": "x" * 10**6})) == MOST_BLOCKS


def test_a_backend_keeps_its_blocks_until_its_weights_change_or_it_restarts() -> None:
    index, (one, two) = PrefixIndex(), backends(1, 1)
    prefix = blocks_of({"prompt": list(range(256))})
    index.add(prefix[:3], one)
    assert index.cached_tokens(prefix, one) == 3 * BLOCK_TOKENS and index.cached_tokens(prefix, two) == 0
    one.weights = "[0, 2]"
    assert index.cached_tokens(prefix, one) == 0
    index.add(prefix, one)
    assert index.cached_tokens(prefix, one) == 4 * BLOCK_TOKENS
    one.restarts += 1
    assert index.cached_tokens(prefix, one) == 0


def test_the_index_is_bounded_and_forgets_what_was_not_used_longest() -> None:
    index, (one,) = PrefixIndex(), backends(1, cache_tokens=100 * BLOCK_TOKENS)
    hot = blocks_of({"prompt": [9] * 640})
    for number in range(500):
        index.add(hot, one)
        index.add(blocks_of({"prompt": [number] * 640}), one)
    assert index.size(one) == 100 and index.cached_tokens(hot, one) == 640
    assert index.cached_tokens(blocks_of({"prompt": [3] * 640}), one) == 0


def test_a_prefix_is_worth_its_tokens_and_never_leads_into_overload() -> None:
    def run() -> None:
        pool = backends(1, 1)
        one = Router(settings(pool, router=RouterConfig(prefix=1)))
        asked = request(list(range(1024)))
        cached, idle = pool
        one.sent(asked, cached)
        assert one.choose(asked, pool) is cached
        attempt = cached.take(1023)
        assert one.choose(asked, pool) is cached
        attempt.release()
        cached.take(1025)
        assert one.choose(asked, pool) is idle, "1,025 tokens of work for 1,024 that are saved"

    in_task(run)


@pytest.mark.parametrize("shared", [True, False])
def test_four_backends_prefill_far_less_than_in_turn_and_no_more_without_shared_prefixes(shared: bool) -> None:
    """Eight system prompts of 1,024 tokens (Zipf), four backends whose caches hold three of them each, least recently used first out."""

    def prefilled(**fields: Any) -> int:
        draw = random.Random(1)
        made = backends(1, 1, 1, 1, cache_tokens=3 * 1088)
        pool = Pool(settings(made, **fields), made)
        systems = [[number] * 1024 for number in range(8)]
        caches: dict[str, list[int]] = {backend.name: [] for backend in made}
        total, running = 0, []
        for number in range(2000):
            which = draw.choices(range(8), weights=[1 / (rank + 1) for rank in range(8)])[0] if shared else number + 100
            prompt = [*(systems[which] if shared else [which] * 1024), *(draw.randrange(10**6) for _ in range(64))]
            asked = request(prompt)
            backend = pool.choose(asked)
            assert backend is not None
            cached = pool.sent(asked, backend)
            cache = caches[backend.name]
            total += len(prompt) - (1024 if which in cache else 0)
            caches[backend.name] = [*[each for each in cache if each != which][-2:], which]
            running.append(backend.take(len(prompt) - cached + 32))
            if len(running) > 12:
                running.pop(draw.randrange(12)).release()
        return total

    async def run() -> float:
        return prefilled(router=RouterConfig(prefix=1)) / prefilled(balance="round_robin")

    ratio = asyncio.run(run())
    assert ratio <= 0.4 if shared else ratio == 1.0
