"""Events of engines correct what the router believes that their prefix caches hold."""

import asyncio
import random
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from gateway_process import gateway, until
from json_server import JsonServer
from routing_cases import backends

from tandem.config.gateway import BackendConfig, BreakerConfig
from tandem.engine.core.request import Prefill, Request, Sequence
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.gateway.backend import Backend, Health
from tandem.gateway.engine_states import EngineStates
from tandem.gateway.routing.prefix_index import PrefixIndex, read_prefix
from tandem.kernels.api import BLOCK_TOKENS
from tandem.serving.engines.block_events import ServedBlockEvents


def prefill_of(tokens: list[int], name: str) -> Prefill:
    return Prefill([Sequence(Request(name, None, tokens, SamplingParams(), 0, 0, 0), 0, 0)], tokens)


def computed(kv_cache: KVCacheManager, tokens: list[int]) -> int:
    """Returns how many tokens of a prompt that goes on after ``tokens`` the engine would not compute."""
    blocks = kv_cache.get_computed_blocks(prefill_of([*tokens, 1], "asks"))
    kv_cache.free(blocks)
    return len(blocks) * BLOCK_TOKENS


@pytest.mark.parametrize("seed", range(3))
def test_the_index_knows_what_the_engine_holds_after_any_evictions(seed: int) -> None:
    """The real cache manager with room for a part of the prompts: the router's index equals it in whole blocks of 64 tokens, for every prompt, all the time."""
    draw = random.Random(seed)
    kv_cache, served, index, (backend,) = KVCacheManager(60), ServedBlockEvents(), PrefixIndex(), backends(1)
    events = kv_cache.record_block_events()
    systems = [[number] * 64 * draw.randint(2, 6) for number in range(6)]
    after, wrong_without = 0, 0
    estimate = PrefixIndex()
    for number in range(300):
        tokens = [*draw.choice(systems), *(draw.randrange(1000) for _ in range(draw.randrange(40)))]
        prefix, share = read_prefix({"prompt": tokens})
        name = f"request {number}"
        index.add(prefix, backend, name, share)
        estimate.add(prefix, backend)
        prefill = prefill_of(tokens, f"engine {number}")
        assert kv_cache.allocate_prompt(prefill, kv_cache.get_computed_blocks(prefill))
        kv_cache.cache_blocks(prefill.sequences[0].request, prefill.block_hashes, prefill.blocks, len(tokens))
        kv_cache.free(prefill.blocks)
        if draw.random() < 0.02:
            kv_cache.reset_prefix_cache()
        served.take(0, events.take(), lambda id: id.replace("engine", "request"))
        answer = served.since(served.stream, after)
        assert not answer["is_reset"]
        after = answer["last"]
        for kind, *fields in answer["events"]:
            if kind == "stored":
                index.stored(backend, *fields, block_size=BLOCK_TOKENS)
            else:
                index.removed(backend, fields[0])
        for system in systems:
            known, _ = read_prefix({"prompt": system})
            truth = computed(kv_cache, system) // 64 * 64
            assert index.cached_tokens(known, backend) == truth
            wrong_without += estimate.cached_tokens(known, backend) != truth
    assert wrong_without > 100, "without events the index is often wrong here"


def test_two_engines_of_a_server_hold_a_block_until_the_last_drops_it() -> None:
    served = ServedBlockEvents(most=5)
    for engine in (0, 1):
        served.take(engine, [["stored", "r", 0, 32, ["aa", "bb"]]], lambda id: "client")
    served.take(0, [["removed", ["aa", "bb"]]], str)
    assert [event[0] for event in served.since(served.stream, 0)["events"]] == ["stored", "stored"]
    served.take(1, [["removed", ["bb"]]], str)
    served.lost(1)
    assert served.since(served.stream, 2)["events"] == [["removed", ["bb"]], ["removed", ["aa"]]]
    assert served.since(served.stream, 4) == {"stream": served.stream, "last": 4, "is_reset": False, "events": []}
    for stream, after in (("other", 4), ("", 0), (served.stream, 5)):
        assert served.since(stream, after)["is_reset"] and not served.since(stream, after)["events"]
    for _ in range(2):
        served.take(0, [["stored", "r", 0, 32, ["cc"]]], str)
    assert served.since(served.stream, 1)["is_reset"] is False and served.since(served.stream, 0)["is_reset"], "five events are kept"


def test_a_text_is_mapped_by_its_share_and_never_beyond_what_is_stored() -> None:
    index, (backend,) = PrefixIndex(), backends(1)
    prefix, share = read_prefix({"prompt": "x" * 1000})
    index.add(prefix, backend, "r", share)
    index.stored(backend, "r", 0, 250, [f"block {number}" for number in range(15)], block_size=16)
    index.removed(backend, ["block 14"])
    assert len(prefix) == 3 and index.size(backend) == 3, "of 1,000 bytes the third block ends at token 192 of 250: block 11"
    index.removed(backend, ["block 11", "unknown"])
    assert index.size(backend) == 2
    index.forget(backend)
    index.stored(backend, "r", 0, 250, ["block 3"], block_size=16)
    assert index.size(backend) == 0


@pytest.mark.full
def test_after_an_eviction_the_router_no_longer_counts_on_the_prefix(tmp_path: Path) -> None:
    """Two real servers: what one evicts for requests that the router has not seen is forgotten at once, for token ids and for a text."""
    from server_process import server
    from tiny_model import make_model, make_tokenizer

    model = make_model(tmp_path / "model", make_tokenizer(tmp_path / "tokenizer"), 0)
    options = ("--served-model-name", "m", "--kv-events", "--kv-cache-tokens", "640", "--max-model-len", "512")
    with ExitStack() as stack:
        servers = [stack.enter_context(server(model, tmp_path, *options)) for _ in range(2)]
        running = stack.enter_context(gateway(tmp_path, servers, router={"prefix": 1}, probes={"interval_s": 0.1, "state_s": 0.05}))
        names = [each.url.removeprefix("http://") for each in servers]
        until(lambda: running.metric("backend_ready") == 2, "both servers")
        until(lambda: all(running.metric("free_cache_tokens", backend=name) == 640 for name in names), "their state")
        for prompt in ([7] * 384, "the quick brown fox jumps over the lazy dog " * 14):
            asked = {"model": "m", "prompt": prompt, "max_tokens": 1}

            def hits(number: int) -> float:
                return servers[number].metric("vllm:prefix_cache_hits_total")

            assert running.post("/v1/completions", asked).status_code == 200
            until(lambda: running.metric("prefix_blocks") > 0, "the blocks to be known")
            home = next(number for number, name in enumerate(names) if running.metric("prefix_blocks", backend=name))
            before = hits(home)
            assert running.post("/v1/completions", asked).status_code == 200
            assert hits(home) > before, "the second request goes where the first was"
            for number in range(3):
                response = servers[home].post("/v1/completions", {"prompt": [100 + number] * 400, "max_tokens": 1})
                assert response.status_code == 200
            until(lambda: running.metric("prefix_blocks") == 0, "the eviction to be known")


def test_backends_that_come_are_asked_for_their_state_and_those_that_go_no_more() -> None:
    """As after the file was read again: the list is changed in place."""
    state = {"block_size": 16, "blocks": 10, "free_blocks": 4, "waiting": 0, "waiting_tokens": 0}
    first, second = (JsonServer(lambda path: state) for _ in range(2))
    made = [Backend.make(BackendConfig(url=server.url), BreakerConfig()) for server in (first, second)]
    for each in made:
        each.health, each.weights = Health.READY, "0.1"

    async def seen(server: JsonServer, more: int = 1) -> None:
        wanted = server.asked + more
        async with asyncio.timeout(60):
            while server.asked < wanted:
                await asyncio.sleep(0.01)

    async def follow() -> None:
        listed = [made[0]]
        async with aiohttp.ClientSession() as session:
            keeping = asyncio.create_task(EngineStates(0.02, listed, session, lambda: None, lambda: None).keep())
            await seen(first)
            assert not second.asked
            listed[:] = [made[1]]
            await seen(second, 5)
            before = first.asked
            await seen(second, 5)
            assert first.asked == before and made[1].engine is not None
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(follow())
    for server in (first, second):
        server.stop()
