"""Prompts that are computed at one server and answered at another: where it pays, with the same answer, and whatever dies."""

import json
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_process import Gateway, gateway
from http_processes import until
from routing_cases import backends, in_task

from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.config.routing import RouterConfig
from tandem.gateway.backend import EngineState
from tandem.gateway.prefill_apart import pays
from tandem.gateway.routing.filters import answering
from tandem.types import UserError


def state(role: str = "both", prefill: float = 0.0, transfer: float = 0.0) -> EngineState:
    return EngineState(1000, 1000, 0, 0, 0.0, role, True, True, prefill, transfer)


@pytest.mark.parametrize(
    ("tokens", "here", "there", "transfer", "streams", "queued", "expected"),
    [
        (1000, 1000, 1000, 10_000, 1, 0, False),  # 1 s here; 1 s there, and 0.1 s to move them.
        (1000, 1000, 1000, 10_000, 2, 0, True),  # A stream waits too: 2 s.
        (1000, 1000, 2000, 10_000, 1, 0, True),  # 0.5 + 0.1 s.
        (1000, 1000, 1000, 500, 2, 0, False),  # 2 s to move them.
        (1000, 1000, 1000, 10_000, 3, 2000, False),  # Others are before it: 3 + 0.1 s beside 3 s.
        (1000, 0, 1000, 0, 2, 0, True),  # As fast here as there.
        (1000, 0, 0, 0, 1, 0, False),
        (1000, 0, 0, 0, 2, 0, True),
    ],
)
def test_it_pays_where_the_request_and_the_streams_beside_it_wait_less(
    tokens: int, here: float, there: float, transfer: float, streams: int, queued: int, expected: bool
) -> None:
    def check() -> None:
        answers, prompts = backends(1, 1)
        answers.engine, prompts.engine = state("decode", here, transfer), state("prefill", there)
        for _ in range(streams):
            answers.take(1)
        if queued:
            prompts.take(queued)
        assert pays(tokens, answers, prompts) is expected

    in_task(check)


def test_a_server_that_computes_prompts_answers_only_where_nobody_else_can() -> None:
    one, other = backends(1, 1)
    assert answering([one, other]) == [one, other], "nothing is known of them"
    one.engine, other.engine = state("prefill"), state("decode")
    assert answering([one, other]) == [other] and answering([one]) == [one]


def test_the_role_in_the_file_is_that_of_a_backend_that_does_not_say_it() -> None:
    one, other = backends(1, 1)
    one.config = replace(one.config, role="prefill")
    assert (one.role, other.role) == ("prefill", "both") and answering([one, other]) == [other]
    other.engine = state("decode")
    assert other.role == "decode"


def test_backends_that_only_compute_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="all 'backends' have 'role: prefill'; give those that answer role: decode"):
        build(GatewayConfig, {"backends": [{"url": "http://h:1", "role": "prefill"}]})


def test_a_number_of_tokens_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"'router.prefill_apart_tokens' is 0; it must be from 1"):
        RouterConfig(prefill_apart_tokens=0).check()


def streamed(at: Any, case: dict[str, Any]) -> dict[int, list[int]]:
    """Returns the tokens of each choice of a stream."""
    text = at.post("/v1/completions", {**case, "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
    tokens: dict[int, list[int]] = {}
    for line in text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return tokens


@pytest.mark.full
def test_the_answers_of_two_servers_are_those_of_one_and_a_death_of_the_first_changes_none(tmp_path: Path) -> None:
    """Real servers: greedy and sampled, whole and streamed, prompts with a common beginning; then kill -9 of the prompts' server while it computes."""
    from server_process import server
    from tiny_model import make_model, make_tokenizer

    model = make_model(tmp_path / "model", make_tokenizer(tmp_path / "tokenizer"), 0)
    options = ("--served-model-name", "m", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
    key = ("--kv-transfer-key", "the key of all servers of a group")
    shared = [4 + 3 * i % 280 for i in range(300)]
    prompts = [shared + [5 + number] * (60 + number) for number in range(3)] + [[9 + i % 250 for i in range(400)]]
    cases: list[dict[str, Any]] = [
        {"model": "m", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **sampling}
        for prompt in prompts
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2})
    ]

    def answers(at: Any) -> list[Any]:
        return [at.post("/v1/completions", case).json()["choices"] for case in cases]

    with ExitStack() as stack:
        alone, prefill, decode = (
            stack.enter_context(server(model, tmp_path, *options, *more)) for more in ((), (*key, "--role", "prefill"), (*key, "--role", "decode"))
        )
        expected = answers(alone)
        settings: dict[str, Any] = {"router": {"prefill_apart": "always"}, "probes": {"interval_s": 0.1, "state_s": 0.05}}
        running: Gateway = stack.enter_context(gateway(tmp_path, [prefill, decode], **settings))
        until(lambda: running.metric("free_cache_tokens", backend=decode.url.removeprefix("http://")) > 0, "the servers' states")
        until(lambda: running.metric("free_cache_tokens", backend=prefill.url.removeprefix("http://")) > 0, "the servers' states")
        assert answers(running) == expected
        assert running.metric("prefills_total", outcome="apart") == len(cases)
        assert decode.metric("tandem:kv_transfers_total", direction="received", outcome="used") == len(cases)
        assert decode.metric("vllm:prompt_tokens_total") == sum(len(case["prompt"]) for case in cases)
        assert streamed(running, cases[1]) == streamed(alone, cases[1])
        for each in (prefill, decode):
            each.wait_idle()
            until(lambda each=each: each.metric("tandem:kv_transfer_held_bytes") == 0, "nothing to be held")
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(answers(running)))
        asking.start()
        prefill.process.send_signal(signal.SIGKILL)
        asking.join(120)
        assert found == expected and answers(running) == expected
        decode.wait_idle()
        until(lambda: decode.metric("tandem:kv_transfer_held_bytes") == 0, "nothing to be held")
        running.wait_idle()


@pytest.mark.full
def test_one_file_starts_servers_for_prompts_and_for_answers_which_die_and_take_new_weights(tmp_path: Path) -> None:
    """Three real servers: the answers are those of one server, whichever of them is killed; after a rolling update they are those of the new weights."""
    from test_gateway_servers import serving
    from tiny_model import make_model, make_tokenizer

    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    second = make_model(tmp_path / "second", tokenizer, 1)
    request = {"model": "tiny", "prompt": [4 + 3 * i % 280 for i in range(300)], "max_tokens": 12, "temperature": 0.9, "seed": 5, "return_token_ids": True}

    def answer(at: Any) -> Any:
        return at.post("/v1/completions", request).json()["choices"][0]["token_ids"]

    flags = {"max-num-batched-tokens": 64, "max-num-seqs": 16, "threads": 1}
    one = {"served_model_name": "tiny", "flags": flags}
    expected = []
    for folder in ("alone", "alone-second"):
        (tmp_path / folder).mkdir()
        with serving(tmp_path / folder, model=str(second if "second" in folder else "model"), flags=flags) as alone:
            until(lambda: alone.get("/readiness").status_code == 200, "the server")
            expected.append(answer(alone))
    assert expected[0] != expected[1]

    (tmp_path / "apart").mkdir()
    settings: dict[str, Any] = {
        "servers": {"prompts": {"model": "model", "role": "prefill", **one}, "answers": {"model": "model", "role": "decode", "count": 2, **one}},
        "router": {"prefill_apart": "always"}, "probes": {"interval_s": 0.1, "state_s": 0.05},
    }  # fmt: skip
    with serving(tmp_path / "apart", gateway=settings) as running:

        def states() -> list[dict[str, Any]]:
            return running.get("/admin/api/state").json()["backends"]

        def are_ready(weights: str = "0.0") -> bool:
            roles = sorted(each["role"] for each in states() if each["health"] == "ready" and each["weight_version"] == weights)
            return roles == ["decode", "decode", "prefill"] and all(running.metric("free_cache_tokens", backend=each["name"]) > 0 for each in states())

        until(are_ready, "three servers")
        assert running.get("/v1/models").json()["data"][0]["id"] == "tiny" and len(running.get("/v1/models").json()["data"]) == 1
        assert [answer(running) for _ in range(4)] == [expected[0]] * 4
        assert running.metric("prefills_total", outcome="apart") >= 1 and running.metric("prefills_total", outcome="failed") == 0
        for name in ("prompts-0", "answers-1"):
            server = next(each for each in psutil.Process(running.process.pid).children() if f"{name}." in " ".join(each.cmdline()))
            server.kill()
            assert [answer(running) for _ in range(4)] == [expected[0]] * 4
            until(are_ready, f"{name} to be back")
        update = running.client.post(f"{running.url}/admin/api/update", json={"model": "tiny", "version": str(second)})
        assert update.status_code == 200, update.text
        while running.metric("server_updates", model="tiny", role="prefill", outcome="done") == 0:
            assert answer(running) in expected
        until(lambda: are_ready("1.0"), "three servers with the new weights")
        before = running.metric("prefills_total", outcome="apart")
        assert [answer(running) for _ in range(2)] == [expected[1]] * 2 and running.metric("prefills_total", outcome="apart") > before
