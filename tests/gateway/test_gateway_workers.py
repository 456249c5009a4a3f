"""Several processes of one gateway behind one address."""

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import FaultBackend, Gateway, fault_backend, gateway, refusal
from http_processes import LIMIT_S, until
from redis_server import Redis, needs_redis

from tandem.config.gateway import BackendConfig, GatewayConfig, LimitConfig, QueueConfig
from tandem.gateway import redis_limits
from tandem.gateway.keys import new_key, write_keys
from tandem.gateway.rate_limit import Refusal, shares_of
from tandem.gateway.siblings import joined_metrics
from tandem.gateway.workers import share_of_worker

ASK = {"model": "m", "prompt": "x", "stream": True}


@pytest.mark.parametrize(("settings", "line"), [
    ({"workers": 0}, "'workers' is 0; it must be from 1 to 64"),
    ({"workers": 65}, "'workers' is 65; it must be from 1 to 64"),
    ({"workers": "two"}, "'workers'"),
    ({"workers": 2, "tenants": {"a": {"limits": {"concurrent": 1}}}}, "'workers' is 2 with 'tenants', whose limits several processes count together in Redis"),
    ({"workers": 2, "other_tenants": {"models": {"m": {"concurrent": 1}}}}, "with 'other_tenants'"),
    ({"workers": 2, "model_limits": {"m": {"concurrent": 1}}}, "with 'model_limits'"),
    ({"workers": 2, "keys_file": "keys.json"}, "with 'keys_file'"),
    ({"workers": 3, "backends": [{"url": "http://a", "max_requests": 2}]}, "'backends.max_requests' of a is 2, less than 'workers' (3)"),
    ({"workers": 2, "servers": {"m": {"model": "runs/m"}}}, "'workers' is 2 with 'servers'"),
    ({"workers": 2, "audit_log": "/dev/null/x"}, "cannot be written"),
    ({"workers": 2, "host": "203.0.113.1"}, "cannot be taken"),
])  # fmt: skip
def test_settings_that_several_processes_cannot_keep_are_one_line(
    settings: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refusal(settings, tmp_path, capsys)


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_parts_of_the_workers_are_the_whole(workers: int) -> None:
    backends = (BackendConfig("http://a", max_requests=10), BackendConfig("http://b", max_requests=7))
    config = GatewayConfig(backends, workers=workers, queue=QueueConfig(max_waiting=100, max_waiting_per_tenant=50))
    shares = [share_of_worker(config, number) for number in range(workers)]
    assert [sum(share.backends[place].max_requests for share in shares) for place in (0, 1)] == [10, 7]
    assert min(backend.max_requests for share in shares for backend in share.backends) >= 1
    assert sum(share.queue.max_waiting for share in shares) == 100 and sum(share.queue.max_waiting_per_tenant for share in shares) == 50


def test_metrics_of_workers_are_one_text_with_each_series_once() -> None:
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    texts: dict[int, str | None] = {}
    for number in (0, 2):
        registry = CollectorRegistry()
        Counter("requests", "Requests {all}.", ("model",), registry=registry).labels('a"{b}').inc(number + 1)
        Counter("retries", "Retries.", registry=registry).inc(5)
        Histogram("seconds", "Seconds.", registry=registry, buckets=(1,)).observe(0.5)
        texts[number] = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(joined_metrics({**texts, 1: None}).decode()))
    assert len({family.name for family in families}) == len(families)
    samples = {(sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples}
    assert samples["requests_total", ("model", 'a"{b}'), ("worker", "2")] == 3 and samples["requests_total", ("model", 'a"{b}'), ("worker", "0")] == 1
    assert samples["retries_total", ("worker", "0")] == samples["retries_total", ("worker", "2")] == 5
    assert samples["seconds_bucket", ("le", "1.0"), ("worker", "0")] == 1
    assert [samples["tandem_gateway_worker_up", ("worker", str(number))] for number in range(3)] == [1, 0, 1]


def children(pid: int) -> list[int]:
    """Returns the processes of a gateway, in the order in which they were started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextlib.contextmanager
def stream(running: Gateway, **fields: Any) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Opens a stream on a connection of its own; gives the number of its worker and the parts."""
    before = {number: running.metric("in_flight_requests", worker=str(number)) for number in range(3)}
    with httpx.Client(verify=False, timeout=LIMIT_S) as client, client.stream("POST", f"{running.url}/v1/completions", json={**ASK, **fields}) as response:
        parts = response.iter_bytes()
        next(parts)
        yield next(number for number in range(3) if running.metric("in_flight_requests", worker=str(number)) > before[number]), parts


def ask(running: Gateway, **headers: str) -> int:
    """Returns the status of a request on a connection of its own, so that the kernel chooses the worker."""
    # To read the authorities of the system takes longer than the request.
    with httpx.Client(verify=False, timeout=LIMIT_S) as client:
        return client.post(f"{running.url}/v1/completions", json={**ASK, "stream": False}, headers=headers).status_code


def test_workers_share_figures_and_administration_and_end_together(tmp_path: Path) -> None:
    with fault_backend("only") as backend, gateway(tmp_path, [backend], workers=2) as running:
        running.wait_ready(backend)
        until(lambda: running.metric("worker_up") == running.metric("backend_ready") == 2, "both workers")
        assert [ask(running) for _ in range(20)] == [200] * 20 and backend.seen() == 20
        counts = [running.metric("requests_total", worker=str(number)) for number in range(2)]
        assert sum(counts) == 20 and min(counts) > 0
        assert running.post("/admin/api/drain", {"backend": "only"}).json()["is_drained"] is True
        assert [ask(running) for _ in range(10)] == [503] * 10 and running.metric("backend_ready") == 0
        pids = children(running.process.pid)
        assert running.stop() == 0 and len(pids) == 2 and all(map(is_gone, pids))


@pytest.mark.full
def test_workers_are_one_gateway_and_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with fault_backend("first") as first, fault_backend("second") as second, gateway(tmp_path, [first, second], workers=3) as running:
        running.wait_ready(first, second)
        until(lambda: running.metric("worker_up") == 3, "all workers")
        assert [ask(running) for _ in range(30)] == [200] * 30
        counts = [running.metric("requests_total", worker=str(number), code="200") for number in range(3)]
        assert sum(counts) == 30 == first.seen() + second.seen() and sum(count > 0 for count in counts) >= 2

        # What an administrator does at one of them holds for all.
        drained = running.post("/admin/api/drain", {"backend": "first"}).json()
        assert drained["is_drained"] is True and drained["max_requests"] == 256
        before = first.seen()
        assert [ask(running) for _ in range(20)] == [200] * 20 and first.seen() == before
        assert running.metric("backend_ready", backend="first") == 0 and running.metric("backend_ready", backend="second") == 3

        # One is killed: its stream is cut off, the others' go on, and the new one knows what was drained.
        second.mode("ok", delay_s=0.3)
        pids = children(running.process.pid)
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(stream(running, max_tokens=300)) for _ in range(6)]
            assert running.get("/admin/api/state").json()["open_requests"] == 6
            hit = streams[0][0]
            os.kill(pids[hit], signal.SIGKILL)
            until(lambda: f"worker {hit}: killed by SIGKILL; it is started again now" in running.log.read_text(), "the supervisor")
            until(lambda: running.metric("worker_up") == 3, "the new worker")
            second.mode("ok")
            for number, parts in streams:
                if number == hit:
                    with pytest.raises(httpx.RemoteProtocolError):
                        list(parts)
                else:
                    assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        until(lambda: running.metric("backend_ready", backend="second") == 3, "the new worker's probe")
        assert running.metric("backend_ready", backend="first") == 0 and [ask(running) for _ in range(20)] == [200] * 20

        # A change of the file reaches all, whether by SIGHUP or through one of them, and a worker that is started later begins with it.
        file = running.log.with_suffix(".yaml")
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "balance": "round_robin"}))
        os.kill(running.process.pid, signal.SIGHUP)
        until(lambda: running.log.read_text().count("the settings were read again; balance changed") == 3, "SIGHUP")
        file.write_text(json.dumps({**settings, "balance": "power_of_two"}))
        assert running.post("/admin/api/reload", {}).json() == {"changed": ["balance"]}
        assert running.log.read_text().count("the settings were read again; balance changed") == 6
        hit = children(running.process.pid)[0]
        os.kill(hit, signal.SIGKILL)
        until(lambda: hit not in children(running.process.pid) and running.metric("worker_up") == 3, "the new worker")
        assert {httpx.get(f"{running.url}/admin/api/state", verify=False, timeout=LIMIT_S).json()["balance"] for _ in range(12)} == {"power_of_two"}
        file.write_text(json.dumps({**settings, "workers": 2}))
        assert running.post("/admin/api/reload", {}).status_code == 400

        # SIGTERM reaches all; what is in flight is finished.
        second.mode("ok", delay_s=0.3)
        pids = children(running.process.pid)
        with stream(running, max_tokens=300) as (_, parts):
            running.process.send_signal(signal.SIGTERM)
            until(lambda: "draining: 1 requests are in flight" in running.log.read_text(), "the drain")
            second.mode("ok")
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        assert running.process.wait(LIMIT_S) == 0 and all(map(is_gone, pids))
        assert len(pids) == 3


@pytest.mark.full
def test_workers_end_with_a_supervisor_that_is_killed_and_a_second_signal_cuts_off(tmp_path: Path) -> None:
    with fault_backend("only") as backend:
        backend.mode("ok", delay_s=0.3)
        with gateway(tmp_path, [backend], workers=3) as running:
            running.wait_ready(backend)
            until(lambda: running.metric("worker_up") == 3, "all workers")
            pids = children(running.process.pid)
            os.kill(running.process.pid, signal.SIGKILL)
            until(lambda: all(map(is_gone, pids)), "the workers to end")
            left = list(Path(tempfile.gettempdir()).glob(f"tandem-gateway-{running.process.pid}-*"))
            assert len(pids) == 3 and len(left) == 1
        with gateway(tmp_path, [backend], workers=3) as running, stream(running, max_tokens=300) as (_, parts):
            running.process.send_signal(signal.SIGTERM)
            until(lambda: "draining: 1 requests are in flight" in running.log.read_text(), "the drain")
            running.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)
            assert running.process.wait(LIMIT_S) == 1
            assert not left[0].exists(), "the next gateway removes what a killed one has left"


@needs_redis
def test_while_redis_is_away_the_parts_of_the_workers_overrun_nothing(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def spend() -> None:
        stores = [redis_limits.RedisLimits("unix:///nowhere.sock", "test", 5.0, lambda _: None, processes=4) for _ in range(4)]
        shares = shares_of("tenant t", LimitConfig(tokens_per_day=50), 7)
        answers = [await stores[number % 4].reserve(str(number), shares) for number in range(200)]
        assert sum(7 for answer in answers if not isinstance(answer, Refusal)) == 28, "4 workers with 12 tokens each"
        # What fits the limit, and not the part, is to be asked for again when Redis is back; what never fits is not.
        large = await stores[0].reserve("large", shares_of("tenant u", LimitConfig(tokens_per_day=50), 40))
        never = await stores[0].reserve("never", shares_of("tenant u", LimitConfig(tokens_per_day=50), 51))
        assert isinstance(large, Refusal) and large.retry_after_s == 1 and large.share.limit == 50
        assert isinstance(never, Refusal) and never.retry_after_s is None
        for store in stores:
            await store.close()

    asyncio.run(spend())


@needs_redis
@pytest.mark.full
def test_the_workers_of_a_gateway_spend_exactly_one_budget(redis: Redis, tmp_path: Path) -> None:
    key, record = new_key("t")
    write_keys(tmp_path / "keys.json", {record.id: record})
    settings = {
        "keys_file": str(tmp_path / "keys.json"), "tenants": {"t": {"limits": {"requests_per_day": 50}}}, "redis": {"url": redis.url, "timeout_s": 30},
    }  # fmt: skip
    with fault_backend("only") as backend, gateway(tmp_path, [backend], workers=3, **settings) as running:
        until(lambda: running.get("/readiness").status_code == 200, "the backend")
        with ThreadPoolExecutor(40) as threads:
            statuses = list(threads.map(lambda _: ask(running, Authorization=f"Bearer {key}"), range(200)))
        assert sorted(statuses) == [200] * 50 + [429] * 150 and backend.seen() == 50
        assert isinstance(backend, FaultBackend) and running.stop() == 0
