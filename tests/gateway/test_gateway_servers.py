"""Servers that the gateway starts itself: where they run, how they are watched, and that nothing of them is left behind."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_process import Gateway
from http_processes import serving_command, until
from server_groups import running_group

from tandem.cli.main import main
from tandem.config.load import build
from tandem.config.servers import ServersConfig
from tandem.gateway.servers.places import Machine, Place, assign, check_gpus, divide_cores, place_for, too_few_cores
from tandem.types import UserError

GPU = {"device": "cuda"}


def test_a_server_gets_the_units_that_the_fewest_hold() -> None:
    assert assign([0, 1, 2, 3], [], 2) == (0, 1)
    assert assign([0, 1, 2, 3], [(0, 1)], 2) == (2, 3)
    assert assign([0, 1, 2, 3], [(0, 1), (2, 3)], 2) == (0, 1), "without a limit the first of those that are held equally"
    assert assign([0, 1, 2, 3], [(0, 1), (2, 3), (0, 2)], 2) == (1, 3)
    assert assign(["a", "b"], [("a",)], 1, most=1) == ("b",) and assign(["a", "b"], [("a",), ("b",)], 1, most=1) is None
    assert assign(["a", "b"], [("a",), ("b",)], 1, most=2) == ("a",) and assign(["a"], [], 2, most=1) is None
    assert assign([], [], 0) == (), "a server on the CPU needs no GPU"


def test_two_servers_share_no_gpu_unless_they_are_asked_to() -> None:
    machine, held = Machine(("0", "1", "2", "3", "4"), (), 1), list[Place]()
    pair = build(ServersConfig, {"model": "m", "flags": {**GPU, "tensor-parallel-size": 2}})
    while (place := place_for(pair, machine, held)) is not None:
        held.append(place)
    assert [each.environment for each in held] == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    named = build(ServersConfig, {"model": "m", "flags": GPU, "gpus": ["3", "GPU-5e"]})
    assert place_for(named, machine, held) == Place(("GPU-5e",), (), 1), "3 is held by a server of another model"
    shared = build(ServersConfig, {"model": "m", "flags": GPU, "gpus": ["0"], "servers_per_gpu": 2, "count": 2})
    assert [place_for(shared, machine, [Place(("0",), (), 1)] * number) is None for number in range(3)] == [False, False, True]
    check_gpus({"a": shared, "b": pair}, ("1", "2"))
    with pytest.raises(UserError, match=r"'servers.b' has up to 1 servers with 2 GPUs each, and there is room for 0 on 2 GPUs \(0, 1\); take fewer"):
        check_gpus({"a": shared, "b": pair}, ("0", "1"))
    with pytest.raises(UserError, match=r"on 0 GPUs \(none is found\)"):
        check_gpus({"b": pair}, ())
    on_cpu = build(ServersConfig, {"model": "m", "count": 3})
    check_gpus({"c": on_cpu}, ())
    assert place_for(on_cpu, machine, held) == Place((), (), 1) and Place((), (), 1).environment == {}


def test_servers_on_cpus_have_cores_of_their_own_while_there_are_enough() -> None:
    config, held = build(ServersConfig, {"model": "m", "count": 2}), list[Place]()
    machine = divide_cores((), (0, 2, 4, 6, 8), 5, 2)
    for _ in range(2):
        place = place_for(config, machine, held)
        assert place is not None
        held.append(place)
    assert [each.cores for each in held] == [(0, 2), (4, 6)] and {each.threads for each in held} == {2}
    assert divide_cores((), (0, 1), 2, 3) == Machine((), (), 1), "more servers than cores: each may run on all, with one thread"
    assert divide_cores((), (0, 1, 2, 3), 2, 2) == Machine((), (), 1), "a quota below the affinity: the numbers say nothing"
    assert divide_cores((), (), 8, 2) == Machine((), (), 4)
    assert too_few_cores({"a": config}, 2) is None
    assert too_few_cores({"a": config, "b": config}, 2) == "warning: 4 servers share 2 cores and slow each other down; lower 'count' of 'servers'"


ONE = {"model": "x", "served_model_name": "m"}


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ({"m": {}}, "key 'servers.m.model' is missing"),
        ({"m": {"model": ""}}, "empty 'model'"),
        ({"m": {"model": "x", "cuont": 2}}, "did you mean 'servers.m.count'?"),
        ({"m": {"model": "x", "count": 0}}, "'servers.count' is 0; it must be from 1 to 1024"),
        ({"m": {"model": "x", "count": 1025}}, "it must be from 1 to 1024"),
        ({"m": {"model": "x", "start_s": 0}}, "'servers.start_s' is 0.0; it must be above 0"),
        ({"m": {"model": "x", "flags": {"port": 8000}}}, "the flag 'port', which the gateway gives itself: it gives each a free port; leave it out"),
        ({"m": {"model": "x", "flags": {"--served-model-name": "y"}}}, "write it as 'served_model_name' of the section"),
        ({"m": {"model": "x", "flags": {"role": "prefill"}}}, "write it as 'role' of the section"),
        ({"m": {"model": "x", "served_model_name": 'a"b'}}, "'servers.m.served_model_name' is 'a\"b'"),
        ({"m": {"model": "x", "role": "prefil"}}, "'servers.m.role' is 'prefil'"),
        ({"m": {"model": "x", "role": "prefill"}}, "'servers.m' has role prefill, and no server answers with the prompts that it computes; add a section with"),
        ({"m": {"model": "x", "role": "decode"}}, "'servers.m' has role decode, and no server computes prompts for 'm'"),
        ({"m": {"model": "x", "role": "prefill", "scale": {"max_count": 2, "min_count": 0}}}, "'servers.scale.min_count' is 0 with role: prefill"),
        ({"m": {"model": "x"}, "n": {"model": "x", "served_model_name": "m"}}, "'servers.m' and 'servers.n' both serve 'm' with role both"),
        ({"p": {**ONE, "role": "prefill"}, "d": {**ONE, "model": "y", "role": "decode"}}, "serves 'm' from 'x' and 'servers.d' from 'y'"),
        ({"p": {**ONE, "role": "prefill", "flags": {"dtype": "bfloat16"}}, "d": {**ONE, "role": "decode"}}, "the flag dtype (bfloat16 and not given)"),
        ({"p": {**ONE, "role": "prefill", "flags": {"kv-transfer-key": "@a"}}, "d": {**ONE, "role": "decode"}}, "values of the flag kv-transfer-key,"),
        ({"m": {"model": "x", "flags": {"device": "cuda:1"}}}, "write cuda, and the GPUs in 'gpus'"),
        ({"m": {"model": "x", "gpus": ["0"]}}, "'servers.gpus' is given, and its servers compute on the CPU; add the flag device: cuda"),
        ({"m": {"model": "x", "flags": GPU, "gpus": ["0", "0"]}}, "names a GPU twice: 0, 0"),
        ({"m": {"model": "x", "flags": {"max-num-sqs": 8}}}, "'servers.m.flags': "),
        ({"m": {"model": "x", "flags": {"max-num-seqs": "many"}}}, "'servers.m.flags': argument --max-num-seqs: "),
        ({"m": {"model": "x", "flags": {"max-model-len": 0}}}, "'servers.m.flags': "),
        ({"a b": {"model": "x"}}, "the section 'a b'"),
        ({"m": {"model": "x", "flags": {**GPU, "tensor-parallel-size": 2}, "gpus": ["0"]}}, "there is room for 0 on 1 GPUs (0); take fewer servers"),
        ({"m": {"model": "x", "log_folder": "gateway.yaml/logs"}}, "which cannot be made"),
    ],
)
def test_settings_that_cannot_work_are_one_line(servers: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"servers": servers, "port": 0}))
    assert main(["gateway", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0], lines


def test_a_backend_and_a_server_cannot_have_one_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text('{"servers": {"m": {"model": "x"}}, "backends": [{"url": "http://h:1", "name": "m-0"}]}')
    assert main(["gateway", str(file)]) == 2
    assert "'backends' has the name 'm-0', which a server of 'm' has" in capsys.readouterr().err


def test_servers_that_die_are_started_again_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, count=2) as running:
            await running.until_ready(2)
            assert {backend.name for backend in running.backends} == {"m-0", "m-1"} and [backend.models for backend in running.backends] == [("m",), ("m",)]
            first, second = running.group.servers
            os.kill(first.process.pid, signal.SIGKILL)
            await running.until(lambda: running.group.restarts == 1, "the loss")
            await running.until_ready(2)
            assert second in running.group.servers and first not in running.group.servers and len(running.backends) == 2
            assert {server.name for server in running.group.servers} == {"m-0", "m-1"}
            (line,) = [line for line in running.said if "is started again" in line]
            said = r"loading 'model'; http://\S+ answers probes meanwhile"
            assert re.fullmatch(rf"server m-0: killed by SIGKILL; its last line: {said}; it is started again now", line)

    asyncio.run(run())


@pytest.mark.full
def test_a_server_that_cannot_start_ends_the_gateway_and_one_that_breaks_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, model="missing") as running:
            await running.until(lambda: running.failure, "the end")
            assert isinstance(running.failure, UserError) and str(running.failure) == "server m-0 ended at its start: 'missing' does not exist; name a folder"
        async with running_group(tmp_path, monkeypatch, model="broken") as running:
            await running.until(lambda: running.group.restarts >= 2, "two attempts")
            assert running.failure is None and running.group.last_death == "m-0: exit status 1; its last line: RuntimeError: out of memory"
            assert any(line.endswith("it is started again in 0.5 s") for line in running.said), "the second wait is longer"
        async with running_group(tmp_path, monkeypatch, model="deaf", start_s=0.2) as running:
            await running.until(lambda: running.group.restarts, "the first attempt")
            assert running.group.last_death.startswith("m-0: it was not ready within 0.2 s")

    asyncio.run(run())


@contextmanager
def serving(folder: Path, gateway: dict[str, Any] | None = None, **settings: Any) -> Iterator[Gateway]:
    """Runs ``tandem gateway`` with settings ``gateway`` and servers of two layers as ``tiny``."""
    from tiny_model import make_model, make_tokenizer

    make_model(folder / "model", make_tokenizer(folder / "tokenizer"), 0)
    file, log = folder / "gateway.yaml", folder / "gateway.log"
    flags = {"max-num-seqs": 16, "threads": 1}
    servers = {"tiny": {"model": "model", "flags": flags, **settings}}
    file.write_text(json.dumps({"servers": servers, "port": 0, "probes": {"interval_s": 0.1}, **(gateway or {})}))
    with serving_command(["gateway", str(file)], log, "gateway at ") as (process, url, client):
        yield Gateway(process, url, client, log)
        assert "Traceback" not in log.read_text(), log.read_text()


def all_ended(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_a_gateway_serves_what_it_started_and_takes_it_along(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        until(lambda: running.get("/readiness").status_code == 200, "the server")
        assert running.complete("tiny", max_tokens=4).json()["usage"]["completion_tokens"] == 4
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert len(children) >= 2, "a server and its engine"
        (state,) = running.get("/admin/api/state").json()["backends"]
        assert state["name"] == "tiny-0" and state["weight_version"] == "0.0"
        assert running.client.post(f"{state['url']}/v1/completions", json={"prompt": "x"}).status_code == 401, "only the gateway has the key of its servers"
        assert running.stop() == 0
        until(lambda: all_ended(children), "the server to end")


@pytest.mark.full
def test_streams_outlive_their_servers_and_no_server_outlives_the_gateway(tmp_path: Path) -> None:
    with serving(tmp_path, count=2) as running, ThreadPoolExecutor(8) as threads:
        until(lambda: running.metric("backend_ready") == 2, "both servers")
        ask = {"model": "tiny", "prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
        asked = [threads.submit(running.post, "/v1/completions", ask) for _ in range(8)]
        until(lambda: running.metric("in_flight_requests") == 8, "the streams")
        (victim, *_) = psutil.Process(running.process.pid).children()
        victim.kill()
        answers = [each.result().text for each in asked]
        assert all(answer.endswith("data: [DONE]\n\n") and "error" not in answer for answer in answers)
        until(lambda: running.metric("backend_ready") == 2, "the next server")
        assert "killed by SIGKILL" in running.log.read_text()
        children = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        until(lambda: all_ended(children), "the servers to die with the gateway")
