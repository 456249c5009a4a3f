"""Pauses, updates and sleep during requests: every client gets a response, and no response mixes weights."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash
from safetensors import safe_open
from server_process import Server, server, until

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(model, tmp_path_factory.mktemp("control"), "--max-num-seqs", "8") as started:
        yield started


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def generate(running: Server, prompt: str, **fields: Any) -> Any:
    return running.post("/generate", {"prompt": prompt, "sampling_params": {**LONG, **fields}}).json()["outputs"][0]


def under_way(running: Server, threads: ThreadPoolExecutor, count: int) -> "list[Future[Any]]":
    """Requests frozen in the middle of their tokens."""
    running.control("/pause?mode=recompute")
    asked = [threads.submit(generate, running, f"prompt {i}") for i in range(count)]
    until(lambda: running.metric("vllm:num_requests_waiting") == count, "the requests to be held")
    while running.metric("vllm:num_requests_running") < count:
        running.control("/resume")
        running.control("/pause?mode=recompute")
    assert not any(one.done() for one in asked)
    return asked


def test_abort_answers_whoever_is_under_way_and_holds_whoever_comes(running: Server, threads: ThreadPoolExecutor) -> None:
    asked = under_way(running, threads, 3)
    assert running.control("/pause") == {"is_paused": True} and running.get("/is_paused").status_code == 401
    answers = [one.result() for one in asked]
    assert {answer["finish_reason"] for answer in answers} == {"abort"} and all(len(answer["token_ids"]) < 300 for answer in answers)
    late = threads.submit(generate, running, "late", max_tokens=4)
    until(lambda: running.metric("vllm:num_requests_waiting") == 1, "the request to be held")
    assert running.get("/readiness").status_code == running.get("/liveness").status_code == running.get("/health").status_code == 200
    assert not late.done()
    assert running.control("/resume") == {"is_paused": False}
    assert late.result()["finish_reason"] == "length"
    running.wait_idle()


def test_wait_finishes_whoever_is_under_way(running: Server, threads: ThreadPoolExecutor) -> None:
    asked = under_way(running, threads, 3)
    paused = threads.submit(running.control, "/pause?mode=wait")
    assert [len(one.result()["token_ids"]) for one in asked] == [300] * 3
    assert paused.result() == {"is_paused": True}
    running.control("/resume")


def test_recompute_freezes_and_goes_on_as_if_nothing_had_been(running: Server, threads: ThreadPoolExecutor, llm: LLM) -> None:
    asked = under_way(running, threads, 2)
    before = running.metric("vllm:generation_tokens_total")
    assert running.metric("vllm:num_requests_running") == 2
    assert running.metric("vllm:generation_tokens_total") == before
    running.control("/resume")
    expected = llm.generate(["prompt 0", "prompt 1"], SamplingParams(**LONG))
    assert [one.result()["token_ids"] for one in asked] == [answer.outputs[0].token_ids for answer in expected]


def test_keep_is_refused_with_what_to_do(running: Server) -> None:
    response = running.post("/pause?mode=keep", headers={"Authorization": "Bearer control"})
    assert response.status_code == 400 and "mode=recompute" in response.json()["error"]["message"]


def test_requests_are_aborted_by_their_names(running: Server, threads: ThreadPoolExecutor) -> None:
    body = {"prompt": "x", "request_id": "mine", **LONG}
    running.control("/pause?mode=recompute")
    mine, other = threads.submit(running.complete, **body), threads.submit(generate, running, "x", max_tokens=5)
    until(lambda: running.metric("vllm:num_requests_waiting") == 2, "both to be held")
    assert running.control("/abort_requests", {"request_ids": ["cmpl-mine", "nobody"]}) == {"aborted": 1}
    assert mine.result()["choices"][0]["finish_reason"] == "abort" and not other.done()
    running.control("/resume")
    assert other.result()["finish_reason"] == "length"


def test_sleep_gives_back_the_cache_and_wakes_with_the_same_numbers(running: Server, threads: ThreadPoolExecutor, llm: LLM) -> None:
    asked = under_way(running, threads, 1)
    assert running.control("/sleep") == {"is_sleeping": True}
    refused = running.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503 and "asleep" in refused.json()["error"]["message"]
    assert running.get("/readiness").status_code == 503 and running.get("/readiness").json() == {"status": "asleep"}
    assert running.get("/liveness").status_code == running.get("/metrics").status_code == running.get("/health").status_code == 200
    assert running.control("/wake_up") == {"is_sleeping": False}
    running.control("/resume")
    assert running.get("/readiness").status_code == 200
    (expected,) = llm.generate("prompt 0", SamplingParams(**LONG))
    assert asked[0].result()["token_ids"] == expected.outputs[0].token_ids


def test_a_prefix_cache_that_was_reset_holds_nothing(running: Server) -> None:
    prompt = "a prompt of more than one block of sixteen tokens, " * 2
    cached = [running.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    running.control("/reset_prefix_cache")
    cached.append(running.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0 < cached[1]


def digests(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: xxhash.xxh3_128_hexdigest(file.get_tensor(name).numpy().tobytes()) for name in file.keys()}  # noqa: SIM118


def test_weights_change_under_load_in_one_step_for_all(
    running: Server, threads: ThreadPoolExecutor, model: Path, other_model: Path, llm: LLM
) -> None:
    def update(folder: Path, version: list[int]) -> Any:
        running.control("/init_weight_transfer_engine", {"init_info": {"backend": "folder"}})
        assert running.control("/start_weight_update", {"version": version}) == {"version": version}
        running.control("/update_weights", {"update_info": {"folder": str(folder)}})
        return running.control("/finish_weight_update")

    assert running.control_get("/weight_info")["version"] == [0, 0]
    assert running.control_get("/weight_checker")["digests"] == digests(model)
    asked = under_way(running, threads, 4)
    assert update(other_model, [1, 0])["version"] == [1, 0]
    running.control("/resume")
    found = running.control_get("/weight_checker")
    assert found["digests"] == digests(other_model) != digests(model) and found["instances_agree"]
    expected = llm.generate([f"prompt {i}" for i in range(4)], SamplingParams(**LONG))
    for one, answer in zip(asked, expected, strict=True):
        completion = one.result()
        versions = [tuple(version) for version in completion["weight_versions"]]
        changes = versions.index((1, 0))
        # Old weights up to one point, new ones after it; up to that point the tokens are the old model's.
        assert versions == [(0, 0)] * changes + [(1, 0)] * (300 - changes)
        assert completion["token_ids"][:changes] == answer.outputs[0].token_ids[:changes]
        prefix = answer.prompt_token_ids + completion["token_ids"][:changes]
        (rest,) = LLM(other_model, max_num_seqs=4).generate({"prompt_token_ids": prefix}, SamplingParams(**{**LONG, "max_tokens": 300 - changes}))
        assert completion["token_ids"][changes:] == rest.outputs[0].token_ids
    new = generate(running, "prompt 0", max_tokens=20)
    (offline,) = LLM(other_model, max_num_seqs=4).generate("prompt 0", SamplingParams(**{**LONG, "max_tokens": 20}))
    assert new["token_ids"] == offline.outputs[0].token_ids
    update(model, [1, 1])
    assert generate(running, "prompt 0", max_tokens=300)["token_ids"] == expected[0].outputs[0].token_ids


def test_an_update_that_is_no_whole_set_changes_nothing(running: Server, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    before = running.control_get("/weight_checker")
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")

    def refused(path: str, body: Any = None) -> str:
        response = running.post(path, body, headers={"Authorization": "Bearer control"})
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    assert "start_weight_update" in refused("/finish_weight_update") and "start_weight_update" in refused("/update_weights", {"update_info": {"folder": "/"}})
    running.control("/start_weight_update")
    assert "not a folder" in refused("/update_weights", {"update_info": {"folder": str(tmp_path / "nowhere")}})
    running.control("/update_weights", {"update_info": {"folder": str(tmp_path)}})
    assert "missing" in refused("/finish_weight_update")
    assert "backend" in refused("/init_weight_transfer_engine", {"init_info": {"backend": "telepathy"}})
    assert running.control_get("/weight_checker") == before


def test_weights_that_are_no_numbers_fail_requests_and_not_the_server(running: Server, model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    def update(folder: Path) -> None:
        running.control("/start_weight_update")
        running.control("/update_weights", {"update_info": {"folder": str(folder)}})
        running.control("/finish_weight_update")

    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.full((32,), torch.nan)}, tmp_path / "model.safetensors")
    update(tmp_path)
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": ["x", "y"], "n": 2}):
        response = running.post("/v1/completions", body)
        assert response.status_code == 500 and "not finite" in response.json()["error"]["message"]
    update(model)
    assert generate(running, "x", max_tokens=3)["finish_reason"] == "length"
    assert running.metric("vllm:request_success_total", finished_reason="error") >= 3
    running.wait_idle()


def test_a_stream_lives_through_a_pause_and_an_update(running: Server, threads: ThreadPoolExecutor, model: Path) -> None:
    body = {"prompt": "x", "stream": True, **LONG}
    before = running.control_get("/weight_info")["version"]
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        seen = [next(lines)]
        running.control("/pause?mode=recompute")
        running.control("/start_weight_update")
        running.control("/update_weights", {"update_info": {"folder": str(model)}})
        assert running.control("/finish_weight_update")["version"] == [before[0], before[1] + 1]
        running.control("/resume")
        seen += list(lines)
    events = [line.removeprefix("data: ") for line in seen if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    running.wait_idle()


@pytest.mark.full
def test_a_rolling_update_gives_every_answer_one_version(model: Path, other_model: Path, tmp_path: Path) -> None:
    """Two instances under a load that never pauses; then one instance, whose requests wait for it."""
    for instances in ("2", "1"):
        with server(model, tmp_path, "--max-num-seqs", "4", "--instances", instances, "--weight-version", "7.1") as running, ThreadPoolExecutor(6) as pool:
            ends = threading.Event()

            def ask(number: int, running: Server = running, ends: threading.Event = ends) -> list[set[tuple[int, int]]]:
                seen = []
                while not ends.is_set():
                    answer = generate(running, f"prompt {number}", max_tokens=40)
                    assert answer["finish_reason"] == "length" and len(answer["token_ids"]) == 40
                    seen.append({tuple(version) for version in answer["weight_versions"]})
                return seen

            asked = [pool.submit(ask, number) for number in range(6)]
            until(lambda running=running: running.metric("vllm:num_requests_running") > 2, "the load")
            assert running.control_get("/weight_info")["instances"] == [[7, 1]] * int(instances)
            running.control("/start_weight_update", {"version": [8, 0]})
            running.control("/update_weights", {"update_info": {"folder": str(other_model)}})
            assert running.control("/finish_weight_update?mode=rolling")["version"] == [8, 0]
            assert running.control_get("/weight_info")["instances"] == [[8, 0]] * int(instances)
            after = generate(running, "prompt 0", max_tokens=4)["weight_versions"]
            ends.set()
            seen = [versions for each in asked for versions in each.result()]
            assert all(len(versions) == 1 for versions in seen), "no answer mixes weights"
            assert set.union(*seen) == {(7, 1), (8, 0)} and after == [[8, 0]] * 4
            assert running.get("/v1/models").json()["data"][0]["weight_version"] == [8, 0]
            running.control("/pause?mode=recompute")
            running.control("/start_weight_update", {"version": [9, 0]})
            refused = running.post("/finish_weight_update?mode=rolling", headers={"Authorization": "Bearer control"})
            assert refused.status_code == 400 and "mode=at_once" in refused.json()["error"]["message"]
            running.control("/resume")
