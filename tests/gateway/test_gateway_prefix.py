"""Routing by prefix: what the index knows, forgets and weighs against load."""

import asyncio
import heapq
import random
from collections import OrderedDict
from typing import Any

from routing_cases import backends, in_task, request

from tandem.config.gateway import GatewayConfig
from tandem.config.routing import RouterConfig
from tandem.gateway.backend import Attempt, Backend, EngineState
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


def test_a_prompt_is_computed_again_at_an_idle_backend_sooner_than_beside_other_requests() -> None:
    def run() -> None:
        holder, other = pool = backends(1, 1)
        one = Router(settings(pool, router=RouterConfig(prefix=1)))
        asked = request(list(range(1024)))
        one.sent(asked, holder)
        holder.take(1500)
        assert one.choose(asked, pool) is other, "it is idle: 1,024 tokens there delay no other request"
        beside = other.take(1)
        assert one.choose(asked, pool) is holder, "1,024 tokens there delay the other request too"
        holder.take(550)
        assert one.choose(asked, pool) is other, "2,050 tokens of work, against 1 and twice 1,024"
        beside.release()
        assert one.choose(request(list(range(5000, 6024))), pool) is other, "nothing is cached: least load"
        other.take(2051)
        assert one.choose(request(list(range(5000, 6024))), pool) is holder

    in_task(run)


def test_what_a_prompt_would_evict_counts_if_others_want_it() -> None:
    index, (one,) = PrefixIndex(), backends(1, cache_tokens=10 * BLOCK_TOKENS)
    wanted, once, new = (blocks_of({"prompt": [number] * 4 * BLOCK_TOKENS}) for number in range(3))
    index.add(once, one)
    index.add(wanted, one)
    index.add(wanted[:2], one)
    assert index.displaced_tokens(new[:2], one) == 0, "it has two free blocks"
    assert index.displaced_tokens(new, one) == 0, "two blocks are evicted that one request has used"
    longer = blocks_of({"prompt": [3] * 9 * BLOCK_TOKENS})
    assert index.displaced_tokens(longer, one) == 1 * BLOCK_TOKENS, "seven: four that one request has used, two more of them, and one that two have"
    assert index.displaced_tokens(wanted, one) == 0, "nothing is evicted for what is there"
    (unknown,) = backends(1)
    index.add(wanted, unknown)
    index.add(wanted, unknown)
    assert index.displaced_tokens(longer, unknown) == 0


def test_the_size_of_a_cache_is_what_its_server_says() -> None:
    index, (one,) = PrefixIndex(), backends(1)
    one.said(EngineState(cache_tokens=4 * BLOCK_TOKENS, free_tokens=0, waiting=0, waiting_tokens=0))
    for number in range(3):
        index.add(blocks_of({"prompt": [number] * 2 * BLOCK_TOKENS}), one)
    assert index.size(one) == 4 and index.cached_tokens(blocks_of({"prompt": [0] * 2 * BLOCK_TOKENS}), one) == 0


def test_a_new_prompt_goes_where_nothing_is_evicted_that_others_want_but_not_into_overload() -> None:
    def run() -> None:
        pool = backends(1, 1, cache_tokens=1024)
        one = Router(settings(pool, router=RouterConfig(prefix=1)))
        full, has_room = pool
        for _ in range(2):
            one.sent(request([7] * 1024), full)
        asked = request([8] * 1024)
        before, attempt = full.take(1), has_room.take(1000)
        assert one.choose(asked, pool) is has_room, "999 tokens more work before it, 1,024 that another request would compute again"
        has_room.take(26)
        assert one.choose(asked, pool) is full
        before.release()
        attempt.release()
        one.sent(asked, has_room)
        one.sent(asked, has_room)
        has_room.take(2021)
        assert one.choose(asked, pool) is has_room
        has_room.take(2)
        assert one.choose(asked, pool) is full, "more than 1,024 that are saved and 1,024 that are evicted"

    in_task(run)


def simulated(requests: int, config: dict[str, Any] | None, seed: int, *, shared: bool = True) -> tuple[int, float]:
    """Returns the prefilled tokens and the seconds of ``requests`` of 12 clients that ask again when they are answered. Eight system prompts of 1,024 tokens
    (Zipf) and 64 tokens of the request's own; four backends whose caches hold 54 blocks, the least recently used out first, prefill one prompt after the
    other at 8,000 tokens a second, and decode up to four answers of 8 tokens beside it in 40 ms. ``config``: of the gateway; ``None``: each
    system prompt has one backend for ever, the placement with the fewest prefilled tokens."""
    draw, capacity = random.Random(seed), 54
    made = backends(1, 1, 1, 1, cache_tokens=capacity * BLOCK_TOKENS)
    pool = Pool(settings(made, **(config or {})), made)
    caches: dict[str, OrderedDict[int, None]] = {backend.name: OrderedDict() for backend in made}
    slots, prefill_free = {backend.name: [0.0] * 4 for backend in made}, dict.fromkeys((backend.name for backend in made), 0.0)
    ends: list[tuple[float, int, Attempt | None]] = [(0.0, client, None) for client in range(12)]
    total = 0
    for number in range(requests):
        now, _, ended = heapq.heappop(ends)
        if ended is not None:
            ended.release()
        which = draw.choices(range(8), weights=[1 / (rank + 1) for rank in range(8)])[0] if shared else number + 100
        asked = request([*[which] * 1024, *(draw.randrange(10**6) for _ in range(64))])
        backend = made[which % 4] if config is None else pool.choose(asked)
        assert backend is not None
        believed, cache, slot = pool.sent(asked, backend), caches[backend.name], slots[backend.name]
        new = 1088 - BLOCK_TOKENS * next((count for count, block in enumerate(asked.prefix) if block not in cache), len(asked.prefix))
        for block in (number, *reversed(asked.prefix)):  # One block for the answer.
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
        total += new
        place = min(range(4), key=slot.__getitem__)
        prefill_free[backend.name] = max(now, slot[place], prefill_free[backend.name]) + new / 8000
        slot[place] = prefill_free[backend.name] + 0.04
        heapq.heappush(ends, (slot[place], 12 + number, backend.take(1088 - believed + 8)))
    return total, max(end for end, _, _ in ends)


def compared(requests: int, seeds: int, *others: dict[str, Any] | None, shared: bool = True) -> list[tuple[float, float]]:
    """Returns the tokens and seconds of routing by prefix, each by those of ``others``, over runs with ``seeds``."""

    async def run() -> list[tuple[float, float]]:
        sums = [
            [sum(each) for each in zip(*(simulated(requests, config, seed, shared=shared) for seed in range(seeds)), strict=True)]
            for config in ({"router": RouterConfig(prefix=1)}, *others)
        ]
        return [(sums[0][0] / tokens, sums[0][1] / seconds) for tokens, seconds in sums[1:]]

    return asyncio.run(run())


def test_four_backends_prefill_three_tenths_of_what_turns_cost_and_take_less_time_than_fixed_homes() -> None:
    (tokens, seconds), (over_fewest, over_homes) = compared(160, 4, {"balance": "round_robin"}, None)
    assert tokens <= 0.3 and seconds <= 0.4
    assert over_fewest <= 1.3 and over_homes <= 1.0, "the fewest tokens, but not the work divided evenly"


def test_without_shared_prefixes_the_choice_is_that_of_least_load() -> None:
    assert compared(160, 1, {}, shared=False) == [(1.0, 1.0)]
