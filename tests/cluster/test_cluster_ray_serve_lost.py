"""What a replica of Ray Serve is answering when it dies is not lost behind Tandem's gateway: requests are answered by another one, and streams go on."""

import concurrent.futures
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import Gateway, gateway
from http_processes import until
from ray_serve import REQUEST, Serve, has_ray, models, served

__all__ = ["models", "served"]
TOKENS = 400
"""As many as take seconds, so that a replica can die in the middle."""


def stream(url: str, request: dict[str, Any], begun: threading.Barrier) -> tuple[str, list[int], str]:
    """Returns text, tokens and the last line of a stream; ``begun`` is waited for after its first event."""
    text, last = "", ""
    ids: list[int] = []
    with httpx.Client(timeout=240) as client, client.stream("POST", f"{url}/v1/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in filter(None, answer.iter_lines()):
            last = line
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                is_first = not ids
                text, ids = text + choice["text"], [*ids, *choice["token_ids"]]
                if is_first:
                    begun.wait(120)
    return text, ids, last


def whole(url: str, request: dict[str, Any]) -> tuple[int, str]:
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=240)
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text


@pytest.mark.full
@has_ray
def test_an_answer_in_flight_on_a_replica_that_is_killed_is_given_by_another_one(served: Serve, models: tuple[Path, Path], tmp_path: Path) -> None:
    served.deploy(model=str(models[0]), served_model_name="tiny", count=2, flags={"max-num-seqs": 16})
    until(lambda: len(served.engines()) == 2, "two replicas")
    requests = [{**REQUEST, "prompt": f"one {number}", "max_tokens": TOKENS, "temperature": 1, "seed": number, "return_token_ids": True} for number in range(8)]
    alone = [whole(served.url, request) for request in requests]
    assert all(status == 200 for status, _ in alone), alone
    with gateway(tmp_path, [], backends=[{"url": served.url, "name": "serve", "replicated": True}]) as running:
        until(lambda: running.metric("backend_ready") == 1, "Serve's proxy")
        killed = kill_one_while_all_are_answered(served, running, requests, alone)
        assert killed and running.metric("resumed_streams_total") >= 1 and running.metric("retries_total") >= 2
    until(lambda: len(served.engines()) == 2, "another replica")


def kill_one_while_all_are_answered(served: Serve, running: Gateway, requests: list[dict[str, Any]], alone: list[tuple[int, str]]) -> int:
    """Streams each of the ``requests`` and asks for each whole, kills a replica when all streams have begun, and compares the answers with those ``alone``."""
    begun = threading.Barrier(len(requests) + 1)
    with concurrent.futures.ThreadPoolExecutor(2 * len(requests)) as threads:
        streams = [threads.submit(stream, running.url, request, begun) for request in requests]
        answers = [threads.submit(whole, running.url, request) for request in requests]
        begun.wait(120)
        os.kill(killed := served.engines()[0], signal.SIGKILL)
        for (_, text), streamed, answer in zip(alone, streams, answers, strict=True):
            got, ids, last = streamed.result()
            assert (got, len(ids), last) == (text, TOKENS, "data: [DONE]")
            assert answer.result() == (200, text)
    return killed
