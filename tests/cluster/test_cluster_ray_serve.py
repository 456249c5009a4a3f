"""Tandem's servers as replicas of a real Ray Serve: they answer and stream, a killed one is replaced, a rolling update loses no request, and their number
follows the time that requests wait."""

import concurrent.futures
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from http_processes import until
from ray_serve import IMPORT, REQUEST, Serve, has_ray, models, served

from tandem.cluster.emit.ray import ray_inference
from tandem.cluster.emit.topology import InferenceTopology, served_model
from tandem.cluster.ray_serve.policy import QueuePolicy
from tandem.cluster.ray_serve.section import read_file, read_section
from tandem.types import UserError

__all__ = ["models", "served"]


def context(**more: Any) -> Any:
    given = {
        "current_time": 100.0, "policy_state": {}, "total_queued_requests": 0, "total_num_requests": 0, "target_num_replicas": 1, "running_replicas": ["a"],
        "raw_metrics": {},
    }  # fmt: skip
    return SimpleNamespace(**{**given, **more})


def series(value: float) -> dict[str, list[Any]]:
    return {"a": [SimpleNamespace(value=0.0), SimpleNamespace(value=value)]}


def test_the_policy_adds_a_replica_when_the_oldest_request_waits_too_long_and_takes_one_away_when_none_does() -> None:
    policy = QueuePolicy({"min_count": 1, "max_count": 4, "target_wait_s": 1.0, "upscale_delay_s": 5.0, "downscale_delay_s": 10.0}, 8)
    late = {"raw_metrics": {"waiting": series(12), "oldest_waiting_s": series(3)}}
    count, state = policy(context(**late))
    assert count == 1
    count, _ = policy(context(**late, current_time=104.0, policy_state=state))
    assert count == 1
    # Twelve that wait fill two of eight.
    count, _ = policy(context(**late, current_time=106.0, policy_state=state))
    assert count == 3
    # Those at the proxy wait too, and Serve does not say how long.
    count, state = policy(context(total_queued_requests=3))
    later = 100.0 + 1.5
    count, state = policy(context(total_queued_requests=3, current_time=later, policy_state=state))
    count, state = policy(context(total_queued_requests=3, current_time=later + 5, policy_state=state))
    assert count == 2
    count, state = policy(context(target_num_replicas=3, running_replicas=["a", "b", "c"]))
    count, state = policy(context(target_num_replicas=3, running_replicas=["a", "b", "c"], current_time=111.0, policy_state=state))
    assert count == 2
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"modle": "x"}, "'args' has the unknown key 'modle'; they are those of a section 'servers'"),
        ({"model": ""}, "a section of 'servers' has an empty 'model'"),
        ({"model": "x", "gpus": ["0"], "flags": {"device": "cuda"}}, "'args' has the key 'gpus', which is not read: Ray Serve"),
        ({"model": "x", "role": "prefill"}, "'args' has the key 'role', which is not read"),
        ({"model": "models/qwen@production"}, "'servers.model' is 'models/qwen@production'; replicas have no model registry"),
        ({"model": "x", "flags": {"port": 1}}, "'servers' has the flag 'port', which the gateway gives itself"),
        ({"model": "x", "count": 3, "scale": {"max_count": 2}}, "'servers.count' is 3; it must be from 1 to 2"),
    ],
)
def test_arguments_that_ray_serve_cannot_follow_are_refused(section: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        read_section(section)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "'serve.yaml' does not exist; name a file of 'serve run'"),
        ("applications: []", "'serve.yaml' has no list of applications with names"),
        ("applications: [{import_path: x}]", "'serve.yaml' has no list of applications with names"),
        (f"applications: [{{name: a, import_path: '{IMPORT}', args: 1}}]", "'args' of application 'a' in 'serve.yaml' are not a mapping"),
        (f"applications: [{{name: a, import_path: '{IMPORT}', args: {{modle: x}}}}]", "'args' has the unknown key 'modle'"),
    ],
    ids=["missing", "empty", "no name", "no args", "unknown"],
)
def test_a_file_that_ray_serve_could_not_run_is_refused(text: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        read_file(Path("serve.yaml"))
    assert str(refused.value).startswith(line)


def test_the_emitted_file_is_one(tmp_path: Path) -> None:
    topology = InferenceTopology(served_model("llama-70b"))
    files = ray_inference(topology, "", tmp_path)
    (tmp_path / "serve.yaml").write_text(files["serve.yaml"])
    assert read_file(tmp_path / "serve.yaml") == ["tandem"]
    (application,) = yaml.safe_load((tmp_path / "serve.yaml").read_text())["applications"]
    config = read_section(application["args"])
    assert (config.count, config.gpus_each, application["deployments"][0]["ray_actor_options"]) == (8, 2, {"num_cpus": 24, "num_gpus": 2})
    # The gateways before Serve's proxy know that it stands for all of them.
    (proxy,) = yaml.safe_load(files["gateway-0.yaml"])["backends"]
    assert proxy["replicated"] is True and proxy["max_requests"] == 8 * 256


def asked_all_the_time(serve: Serve, answers: list[tuple[int, str]], ends: threading.Event) -> None:
    with httpx.Client(base_url=serve.url, timeout=300) as client:
        while not ends.is_set():
            answer = client.post("/v1/completions", json=REQUEST)
            answers.append((answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text))


@pytest.mark.full
@has_ray
def test_replicas_answer_and_stream_and_a_killed_one_is_replaced_and_an_update_loses_no_request(served: Serve, models: tuple[Path, Path]) -> None:
    flags = {"max-num-seqs": 8}
    served.deploy(model=str(models[0]), served_model_name="tiny", count=2, flags=flags)
    until(lambda: len(served.engines()) == 2, "two replicas")
    first = served.ask()
    assert first.status_code == 200, first.text
    text = first.json()["choices"][0]["text"]
    with served.client.stream("POST", "/v1/completions", json={**REQUEST, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(events) > 4 and "".join(event["choices"][0]["text"] for event in events) == text
    # What the server refuses comes as it is.
    refused = served.client.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
    assert refused.status_code == 404 and "nobody" in refused.json()["error"]["message"]
    assert served.client.post("/sleep").status_code in (401, 403, 404)

    killed = served.engines()[0]
    os.kill(killed, signal.SIGKILL)
    until(lambda: len(served.engines()) == 2 and killed not in served.engines(), "another replica")
    until(lambda: served.ask().status_code == 200, "answers")

    answers: list[tuple[int, str]] = []
    ends = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(asked_all_the_time, served, answers, ends) for _ in range(4)]
        before = served.engines()
        try:
            served.deploy(model=str(models[1]), served_model_name="tiny", count=2, flags=flags)
            until(lambda: len(served.engines()) == 2 and not set(before) & set(served.engines()), "all replicas to be new ones", 240)
            time.sleep(2)
        finally:
            ends.set()
        for each in asking:
            each.result()
    failed = [answer for answer in answers if answer[0] != 200]
    assert failed == [] and len(answers) > 20
    assert answers[0][1] == text and answers[-1][1] != text and len({answer[1] for answer in answers}) == 2


@pytest.mark.full
@has_ray
def test_the_number_of_replicas_follows_the_time_that_requests_wait(served: Serve, models: tuple[Path, Path]) -> None:
    scale = {"min_count": 1, "max_count": 2, "target_wait_s": 0.2, "upscale_delay_s": 1.0, "downscale_delay_s": 5.0}
    served.deploy(model=str(models[0]), served_model_name="tiny", flags={"max-num-seqs": 1}, scale=scale)
    until(lambda: len(served.engines()) == 1, "one replica")
    ends = threading.Event()

    def flood() -> None:
        while not ends.is_set():
            assert served.ask(max_tokens=64).status_code == 200

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(flood) for _ in range(6)]
        try:
            until(lambda: len(served.engines()) == 2, "a second replica", 240)
        finally:
            ends.set()
        for each in asking:
            each.result()
    until(lambda: len(served.engines()) == 1, "one replica again", 240)
    assert served.ask().status_code == 200


