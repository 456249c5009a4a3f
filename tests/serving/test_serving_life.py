"""Start, drain and stop; clients that leave or read slowly; engines that are killed."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import Server, server, until

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
COMMAND = str(Path(sys.executable).with_name("tandem"))


def refused(*arguments: str) -> str:
    """Returns the error line of a server that does not start."""
    done = subprocess.run([COMMAND, "serve", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "", (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if "answers probes meanwhile" not in line]
    assert len(lines) == 1 and lines[0].startswith("tandem: "), done.stderr
    return lines[0]


@pytest.mark.full
def test_what_cannot_be_served_is_one_line(shared: Server, model: Path, tmp_path: Path) -> None:
    port = shared.url.rpartition(":")[2]
    assert f"port {port} on 127.0.0.1 cannot be taken (Address already in use)" in refused(str(model), "--port", port)
    assert "no config.json" in refused(str(tmp_path))
    assert "tensor_parallel_size" in refused(str(model), "--port", "0", "--tensor-parallel-size", "3")
    assert "instances is 0" in refused(str(model), "--instances", "0")
    assert "control key is also" in refused(str(model), "--api-key", "a", "--control-key", "a")
    assert "not an address" in refused(str(model), "--host", "nowhere.invalid")
    assert "max_model_len is 9999" in refused(str(model), "--port", "0", "--max-model-len", "9999")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in refused(str(tmp_path))


class Reader:
    """A client that reads at its own pace."""

    def __init__(self, running: Server, body: dict[str, Any], buffer: int = 0) -> None:
        host, port = running.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(120)
        self.socket.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)
        self.got = bytearray()

    def read(self, count: int = 65536) -> bool:
        part = self.socket.recv(count)
        self.got += part
        return bool(part)

    def rest(self) -> str:
        while not self.got.endswith(b"0\r\n\r\n") and self.read():
            pass
        return self.got.decode()


def test_a_client_that_leaves_frees_everything(shared: Server) -> None:
    shared.wait_idle()
    files, aborted = shared.files(), shared.metric("vllm:request_success_total", finished_reason="abort")
    for stream in (True, False):
        readers = [Reader(shared, {"prompt": f"left {i}", "stream": stream, "n": 2, "seed": 1, "max_tokens": 480, "ignore_eos": True}) for i in range(6)]
        if stream:
            assert all(reader.read(10) for reader in readers)
        for reader in readers:
            reader.socket.close()
        shared.wait_idle()
    assert shared.metric("vllm:request_success_total", finished_reason="abort") >= aborted + 6
    until(lambda: shared.files() <= files, "the sockets to be closed")


def test_a_slow_reader_holds_up_nobody_and_misses_nothing(shared: Server, llm: LLM) -> None:
    (expected,) = llm.generate("slow", SamplingParams(**LONG))
    slow = Reader(shared, {"prompt": "slow", "stream": True, "return_token_ids": True, **LONG}, buffer=2048)
    slow.read(10)
    assert shared.complete("fast", max_tokens=8)["choices"]
    text = slow.rest()
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert tokens == expected.outputs[0].token_ids and "data: [DONE]" in text
    slow.socket.close()


def storm(running: Server, count: int) -> None:
    """Starts ``count`` streams at once, of which half disconnect at random; the others receive everything."""
    files = running.files()
    rng = random.Random(count)
    readers = [Reader(running, {"prompt": f"p{i % 7}", "stream": True, "seed": i, "max_tokens": 24, "ignore_eos": True}) for i in range(count)]
    leaving = set(rng.sample(range(count), count // 2))
    for i in sorted(leaving, key=lambda _: rng.random()):
        if rng.random() < 0.7:
            readers[i].read(rng.randrange(1, 2000))
        readers[i].socket.close()
    for i, reader in enumerate(readers):
        if i not in leaving:
            text = reader.rest()
            assert text.count('"finish_reason":"length"') == 1 and "data: [DONE]" in text
            reader.socket.close()
    running.wait_idle()
    until(lambda: running.files() <= files, "the sockets to be closed")


def test_a_hundred_streams_with_disconnects_leave_nothing_behind(shared: Server) -> None:
    shared.wait_idle()
    storm(shared, 100)


@pytest.mark.full
def test_a_thousand_streams_with_disconnects_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path, "--instances", "2", "--max-num-seqs", "64", "--max-waiting", "2000") as running:
        for _ in range(3):
            storm(running, 1000)
        assert running.stop() == 0 and "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines behind one server."""
    with server(model, tmp_path_factory.mktemp("pair"), "--instances", "2", "--max-num-seqs", "8") as running:
        yield running


def test_requests_go_to_the_engine_with_the_least_work(pair: Server) -> None:
    pair.control("/pause?mode=recompute")
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(pair.complete, "x", **LONG)]
        until(lambda: pair.metric("vllm:num_requests_waiting") == 1, "the first")
        asked += [threads.submit(pair.complete, "x", max_tokens=10, ignore_eos=True) for _ in range(3)]
        until(lambda: pair.metric("vllm:num_requests_waiting") == 4, "all of them")
        assert sorted(pair.metric("vllm:num_requests_waiting", engine=str(i)) for i in range(2)) == [1, 3]
        pair.control("/resume")
        assert all(one.result()["choices"] for one in asked)


def test_an_engine_that_is_killed_is_replaced_and_no_answer_changes(pair: Server, other_model: Path) -> None:
    pair.control("/start_weight_update", {"version": [0, 7]})
    pair.control("/update_weights", {"update_info": {"folder": str(other_model)}})
    assert pair.control("/finish_weight_update")["version"] == [0, 7]
    prompts = [f"prompt {i}" for i in range(6)]
    expected = LLM(other_model, max_num_seqs=8).generate(prompts, SamplingParams(**LONG))
    engines = pair.engines()
    assert len(engines) == 2
    readers = [Reader(pair, {"prompt": prompt, "stream": True, "return_token_ids": True, **LONG}) for prompt in prompts[:4]]
    with ThreadPoolExecutor(2) as threads:
        whole = [threads.submit(pair.complete, prompt, return_token_ids=True, **LONG) for prompt in prompts[4:]]
        assert all(reader.read(400) for reader in readers)
        os.kill(engines[0], signal.SIGKILL)
        found = []
        for reader in readers:
            events = [json.loads(line.removeprefix("data: ")) for line in reader.rest().splitlines() if line.startswith("data: {")]
            found.append([token for event in events for choice in event["choices"] for token in choice["token_ids"]])
            reader.socket.close()
        found += [one.result()["choices"][0]["token_ids"] for one in whole]
    assert found == [answer.outputs[0].token_ids for answer in expected]
    until(lambda: "is back" in pair.log.read_text(), "the engine to be back")
    log = pair.log.read_text()
    assert "died: killed by SIGKILL; it is started again" in log and "Traceback" not in log
    assert pair.metric("tandem:engine_restarts_total") == 1 and len(set(pair.engines()) - set(engines)) == 1
    assert pair.control_get("/weight_info")["instances"] == [[0, 7], [0, 7]]
    assert pair.control_get("/weight_checker")["instances_agree"]


@pytest.mark.full
def test_an_engine_that_dies_in_the_middle_of_an_update_comes_back_with_the_new_weights(pair: Server, model: Path) -> None:
    restarts = pair.metric("tandem:engine_restarts_total")
    pair.control("/start_weight_update", {"version": [3, 1]})
    pair.control("/update_weights", {"update_info": {"folder": str(model)}})
    os.kill(pair.engines()[0], signal.SIGKILL)
    until(lambda: pair.log.read_text().count("is back") == restarts + 1, "the engine to be back")
    assert pair.control("/finish_weight_update")["version"] == [3, 1]
    until(lambda: pair.control_get("/weight_info")["instances"] == [[3, 1], [3, 1]], "both to have the new weights")
    assert pair.control_get("/weight_checker")["instances_agree"]


@pytest.mark.full
def test_a_stream_that_cannot_be_repeated_ends_with_an_error_event(pair: Server, other_model: Path) -> None:
    until(lambda: len(pair.engines()) == 2 and len(pair.control_get("/weight_info")["instances"]) == 2, "both engines")
    pair.control("/pause?mode=recompute")
    reader = Reader(pair, {"prompt": "x", "stream": True, **LONG})
    until(lambda: pair.metric("vllm:num_requests_waiting") == 1, "the request to be held")
    while pair.metric("vllm:num_requests_running") < 1:
        pair.control("/resume")
        pair.control("/pause?mode=recompute")
    pair.control("/start_weight_update")
    pair.control("/update_weights", {"update_info": {"folder": str(other_model)}})
    pair.control("/finish_weight_update")
    backs = pair.log.read_text().count("is back")
    for engine in pair.engines():
        os.kill(engine, signal.SIGKILL)
    events = [line.removeprefix("data: ") for line in reader.rest().splitlines() if line.startswith("data: ")]
    error = json.loads(events[-2])["error"]
    assert events[-1] == "[DONE]" and error["type"] == "service_unavailable_error" and "cannot be repeated" in error["message"]
    until(lambda: pair.log.read_text().count("is back") == backs + 2, "both engines to be back")
    # They are restarted in the state that they had: paused.
    assert pair.control_get("/is_paused") == {"is_paused": True}
    pair.control("/resume")
    assert pair.complete("x", max_tokens=1)["choices"]


def test_the_listening_process_has_no_torch(shared: Server) -> None:
    (engine,) = shared.engines()
    loaded = [Path(f"/proc/{pid}/maps").read_text() for pid in (shared.process.pid, engine)]
    assert "libtorch" not in loaded[0] and "libtorch" in loaded[1]


@pytest.mark.full
def test_a_tensor_parallel_engine_answers_as_one_rank_does(model: Path, tmp_path: Path, llm: LLM) -> None:
    (expected,) = llm.generate("the quick", SamplingParams(max_tokens=12, seed=1, logprobs=0))
    with server(model, tmp_path, "--tensor-parallel-size", "2") as running:
        choice = running.complete("the quick", max_tokens=12, seed=1, logprobs=0)["choices"][0]
        assert choice["text"] == expected.outputs[0].text
        assert choice["logprobs"]["token_logprobs"] == expected.outputs[0].raw_logprobs
        for path in ("/sleep", "/weight_checker"):
            call = running.post if path == "/sleep" else running.get
            response = call(path, headers={"Authorization": "Bearer control"})
            assert response.status_code == 400 and "tensor-parallel" in response.json()["error"]["message"]
        processes = psutil.Process(running.process.pid).children(recursive=True)
        assert len(processes) == 2 and running.stop() == 0
        until(lambda: not any(process.is_running() for process in processes), "every rank to be gone")


def test_a_server_that_is_killed_takes_its_engines_along(model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path, ready=False) as running:
        until(lambda: running.engines(), "the engine to be started")
        (engine,) = running.engines()
        assert running.get("/startup").status_code == running.get("/readiness").status_code == running.get("/health").status_code == 503
        assert running.get("/liveness").status_code == 200
        early = running.post("/v1/completions", {"prompt": "x"})
        assert early.status_code == 503 and early.headers["retry-after"] == "5"
        running.stop(signal.SIGKILL)
        until(lambda: not psutil.pid_exists(engine) or psutil.Process(engine).status() == psutil.STATUS_ZOMBIE, "the engine to be gone")


UNREAD = {"prompt": "x", "stream": True, "seed": 1, "max_tokens": 480, "ignore_eos": True, "n": 16, "logprobs": 20}
"""More than all buffers between a server and a reader who does not read."""


def test_sigterm_lets_streams_end_and_refuses_new_ones(model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path) as running:
        reader = Reader(running, UNREAD, buffer=4096)
        reader.read(10)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.get("/readiness").status_code == 503, "the server to drain")
        assert running.get("/readiness").json() == {"status": "draining"} and running.get("/liveness").status_code == 200
        refusal = running.post("/v1/completions", {"prompt": "x"})
        assert refusal.status_code == 503 and "shutting down" in refusal.json()["error"]["message"]
        text = reader.rest()
        assert text.count('"finish_reason":"length"') == 16 and "data: [DONE]" in text
        assert running.process.wait(60) == 0
        assert running.log.read_text().splitlines()[-1] == "tandem: stopped"


@pytest.mark.full
def test_a_second_signal_ends_it_now(model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path) as running:
        (engine,) = running.engines()
        reader = Reader(running, UNREAD, buffer=4096)
        reader.read(10)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in running.log.read_text(), "the server to drain")
        assert running.stop() == 1
        assert not psutil.pid_exists(engine) and "cut off" in running.log.read_text().splitlines()[-1]


@pytest.mark.full
def test_a_reader_that_stalls_is_given_up(model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path, "--stall-timeout", "1") as running:
        reader = Reader(running, UNREAD, buffer=4096)
        reader.read(10)
        files = running.files()
        until(lambda: running.files() < files, "the connection to be cut")
        assert "data: [DONE]" not in reader.rest()
        running.wait_idle()


def test_an_idle_server_uses_no_cpu(shared: Server) -> None:
    import time

    shared.wait_idle()
    processes = [psutil.Process(pid) for pid in (shared.process.pid, *shared.engines())]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(2)
    server_s, engine_s = (sum(process.cpu_times()[:2]) - used for process, used in zip(processes, before, strict=True))
    assert engine_s == 0 and server_s <= 0.1
