"""A prompt that one server computes and an answer that another gives, from the same KV blocks: the same answer, whatever happens to the blocks on their way."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_processes import until
from server_process import Server, server

from tandem.cli.vllm_flags import check_flags
from tandem.config.engine import EngineArgs
from tandem.serving.kv_transfer.remote_blocks import RemoteBlocks
from tandem.serving.kv_transfer.settings import KVTransferSettings
from tandem.serving.settings import ServerSettings
from tandem.types import UserError, WeightVersion

sys.path.append(str(Path(__file__).parents[1] / "weight_transfer"))

from tcp_proxy import TcpProxy

KEY = "the key of all servers of a group"
PROMPT = [(7 * i) % 290 + 4 for i in range(200)]
"""12 full blocks, and 8 tokens."""
CACHED = 192
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 3, "logprobs": 2, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that computes prompts and fetches their blocks, from itself."""
    options = ("--served-model-name", "tiny", "--max-num-seqs", "32", "--kv-transfer-key", KEY, "--kv-transfer-memory", "0.01")
    with server(model, tmp_path_factory.mktemp("both"), *options) as running:
        yield running
        assert running.process.poll() is None and "Traceback" not in running.log.read_text(), running.log.read_text()


def prefill(at: Server, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """Returns ``kv_transfer_params`` of a prompt."""
    return at.complete(prompt, **{**GREEDY, **fields}, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]


def without_name(answer: Any) -> Any:
    """Returns what of an answer depends on its tokens alone."""
    return [{**choice} for choice in answer["choices"]]


def is_idle(at: Server) -> bool:
    return all(at.metric(name) == 0 for name in ("tandem:kv_transfer_held_bytes", "tandem:kv_transfer_held_prompts", "vllm:kv_cache_usage_perc"))


def received(at: Server, outcome: str) -> float:
    return at.metric("tandem:kv_transfers_total", direction="received", outcome=outcome)


def moved(remote: RemoteBlocks, **changes: Any) -> dict[str, Any]:
    return replace(remote, **changes).to_params(KEY)


@contextlib.contextmanager
def altered(remote: RemoteBlocks, alter: Callable[[int, bytearray], bool], most: int = 1000) -> Iterator[dict[str, Any]]:
    """Gives the place of the blocks behind a connection that ``alter`` changes, the first ``most`` times."""
    left = [most]

    def fault() -> Callable[[int, bytearray], bool]:
        left[0] -= 1
        return alter if left[0] >= 0 else lambda sent, block: True

    proxy = TcpProxy(remote.port, fault)
    try:
        yield moved(remote, port=proxy.port)
    finally:
        proxy.close()


def flip_a_bit_of_the_blocks(sent: int, block: bytearray) -> bool:
    if sent + len(block) > 5_000 >= sent:
        block[5_000 - sent] ^= 1
    return True


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED])
def test_an_answer_from_fetched_blocks_is_that_of_one_server(shared: Server, both: Server, fields: dict[str, Any]) -> None:
    expected = without_name(shared.complete(PROMPT, **fields))
    used = received(both, "used")
    params = prefill(both, **fields)
    both.control("/reset_prefix_cache")
    answer = both.complete(PROMPT, **fields, kv_transfer_params=params)
    assert without_name(answer) == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED and received(both, "used") == used + 1
    until(lambda: is_idle(both), "nothing to be held")
    both.control("/reset_prefix_cache")


def test_chats_and_streams_too(shared: Server, both: Server) -> None:
    body = {"messages": [{"role": "user", "content": "the quick brown fox " * 12}], "max_tokens": 9, "seed": 3, "stream": True}
    body["stream_options"] = {"include_usage": True}

    def events(at: Server, more: dict[str, Any]) -> tuple[list[Any], Any]:
        response = at.post("/v1/chat/completions", {**body, **more})
        assert response.status_code == 200, response.text
        parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return [part["choices"] for part in parts], parts[-1]["usage"]

    response = both.post("/v1/chat/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
    assert response.headers["content-type"] == "application/json" and response.json()["choices"] == []
    both.control("/reset_prefix_cache")
    choices, usage = events(both, {"kv_transfer_params": response.json()["kv_transfer_params"]})
    assert choices == events(shared, {})[0]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16 > 0
    until(lambda: is_idle(both), "nothing to be held")


def test_a_bit_that_flips_on_the_way_is_read_again_and_one_that_flips_twice_is_named_and_computed(shared: Server, both: Server) -> None:
    expected = without_name(shared.complete(PROMPT, **SAMPLED))
    for flips, outcome, cached in ((1, "used", CACHED), (1000, "altered", 0)):
        before = received(both, outcome)
        remote = RemoteBlocks.from_params(prefill(both), KEY)
        both.control("/reset_prefix_cache")
        with altered(remote, flip_a_bit_of_the_blocks, flips) as params:
            answer = both.complete(PROMPT, **SAMPLED, kv_transfer_params=params)
        assert without_name(answer) == expected and received(both, outcome) == before + 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        both.control("/reset_prefix_cache")
    log = both.log.read_text()
    assert f"(altered), so it is computed here: block 0 was received twice and does not have its digest {remote.blocks[0][1]}" in log
    until(lambda: is_idle(both), "nothing to be held")


def test_blocks_that_cannot_be_used_are_computed_and_it_is_said_why(shared: Server, both: Server) -> None:
    expected = without_name(shared.complete(PROMPT, **SAMPLED))
    cases: list[tuple[Callable[[RemoteBlocks], dict[str, Any]], str]] = [
        (lambda good: {**good.to_params(KEY), "remote_port": 1}, "was not made by a server with this server's --kv-transfer-key"),
        (lambda good: good.to_params("another key of sixteen"), "was not made by a server with this server's --kv-transfer-key"),
        (lambda good: {"do_remote_prefill": True}, "was not made by a server with this server's --kv-transfer-key"),
        (lambda good: moved(good, version=WeightVersion(0, 4)), "KV blocks of weights [0, 4] cannot be used: this server has weights [0, 0]"),
        (lambda good: moved(good, layout={**good.layout, "kv_cache_dtype": "int8"}), "kv_cache_dtype is int8 there and auto here; start both with the same"),
        (lambda good: moved(good, layout={**good.layout, "weights": "0" * 32}), f"weights is {'0' * 32} there and "),
        (lambda good: moved(good, segment="tandem-serve-1-kv-1-1"), "it holds nothing in the place of the KV blocks of step 0"),
        (lambda good: moved(good, port=1), "(lost), so it is computed here"),
        (lambda good: moved(good, blocks=tuple(("0" * 32, digest) for _, digest in good.blocks)), "it holds the KV blocks"),
    ]  # fmt: skip
    for change, why in cases:
        params = change(RemoteBlocks.from_params(prefill(both), KEY))
        both.control("/reset_prefix_cache")
        answer = both.complete(PROMPT, **SAMPLED, kv_transfer_params=params)
        assert without_name(answer) == expected and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert why in both.log.read_text(), (why, both.log.read_text())
    # Those of another prompt: the sender has them, and the engine does not look for them.
    other = PROMPT[1:]
    expected = without_name(shared.complete(other, **SAMPLED))
    both.control("/reset_prefix_cache")
    params = prefill(both)
    both.control("/reset_prefix_cache")
    assert without_name(both.complete(other, **SAMPLED, kv_transfer_params=params)) == expected
    assert "KV blocks of another prompt or of other weights cannot be used" in both.log.read_text()
    both.control("/reset_prefix_cache")


def test_blocks_beyond_the_memory_are_not_offered(both: Server) -> None:
    """0.01 GiB: as many prompts as there is room for wait to be fetched, and no more."""
    before = both.metric("tandem:kv_transfer_held_bytes")
    prompts = [[4 + (number * 31 + i) % 280 for i in range(500)] for number in range(60)]
    given = [prefill(both, prompt) for prompt in prompts]
    offered = [params for params in given if params is not None]
    assert both.metric("tandem:kv_transfer_held_bytes") <= 0.01 * 2**30 and 20 < len(offered) < 60
    assert "find no room beside" in both.log.read_text()
    for params in offered:
        # Fetching needs room, too.
        both.complete(prompts[given.index(params)], **GREEDY, kv_transfer_params=params)
    assert received(both, "failed") >= 1
    until(lambda: both.metric("tandem:kv_transfer_held_bytes") <= before, "those that were fetched or refused to be freed")


def test_a_client_that_leaves_while_blocks_come_leaves_nothing_behind(both: Server) -> None:
    held = both.metric("tandem:kv_transfer_held_bytes")
    remote = RemoteBlocks.from_params(prefill(both), KEY)
    both.control("/reset_prefix_cache")
    goes_on, has_begun = threading.Event(), threading.Event()

    def stall(sent: int, block: bytearray) -> bool:
        if sent > 1000:
            has_begun.set()
            goes_on.wait(30)
        return True

    before = received(both, "cancelled")
    with altered(remote, stall, most=1) as params:
        body = json.dumps({"prompt": PROMPT, **GREEDY, "kv_transfer_params": params}).encode()
        host, _, port = both.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert has_begun.wait(60)
        # A silent connection counts as broken after a second, so either may be first.
        until(lambda: received(both, "cancelled") + received(both, "lost") > before, "the transfer to end")
        goes_on.set()
    until(lambda: both.metric("vllm:kv_cache_usage_perc") == 0, "no block to be held")
    until(lambda: both.metric("tandem:kv_transfer_held_bytes") <= held, "what was fetched and what it was fetched to to be freed")


def test_fields_that_make_no_sense_are_refused_in_one_line(shared: Server, both: Server) -> None:
    for at, body, why in (
        (shared, {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}}, "start it with --role prefill"),
        (shared, {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}, "start it with --role decode"),
        (both, {"prompt": ["x", "y"], "kv_transfer_params": {"do_remote_decode": True}}, "send one prompt"),
        (both, {"prompt": "x", "kv_transfer_params": 3}, "kv_transfer_params"),
    ):  # fmt: skip
        response = at.post("/v1/completions", body)
        assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
    assert shared.complete("x", kv_transfer_params={})["choices"], "as vLLM's clients send it"
    assert prefill(both, [5] * 16) is None, "a prompt without a whole block before its last token"


def test_a_server_says_what_it_does_and_how_fast(both: Server, shared: Server) -> None:
    said = both.get("/kv_cache").json()
    assert (said["role"], said["sends"], said["receives"]) == ("both", True, True)
    assert said["prefill_tokens_per_s"] > 0 and said["transfer_tokens_per_s"] > 0
    said = shared.get("/kv_cache").json()
    assert (said["role"], said["sends"], said["receives"], said["transfer_tokens_per_s"]) == ("both", False, False, 0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"role": "prefill"}, "--role prefill needs --kv-transfer-key"),
        ({"key": "short"}, "--kv-transfer-key has fewer than 16 characters"),
        ({"key": KEY, "port": 70000}, "--kv-transfer-port is 70000"),
        ({"key": KEY, "memory_bytes": 0}, "--kv-transfer-memory is 0 GiB"),
        ({"key": KEY, "timeout_s": 0.0}, "--kv-transfer-timeout is 0"),
        ({"key": KEY, "host": "0.0.0.0"}, "name this machine's address with --kv-transfer-host"),
        ({"role": "other"}, "--role is 'other'; it must be one of both, prefill, decode"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        KVTransferSettings(**given).check()


def test_what_does_not_go_with_it_is_refused_before_the_model_is_loaded(model: Path) -> None:
    with pytest.raises(UserError, match="--tensor-parallel-size 2: the heads of its KV blocks"):
        ServerSettings(EngineArgs(model=str(model), tensor_parallel_size=2), kv_transfer=KVTransferSettings(key=KEY)).check()
    with pytest.raises(UserError, match=r"use --role prefill \(kv_producer\)"):
        check_flags(['--kv-transfer-config={"kv_role": "kv_producer"}'], ())
