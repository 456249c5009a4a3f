"""The table of faults: each row breaks something for real while clients ask, and says what became of every request.

``rows`` is what the tests run with few requests and ``benchmarks/gateway_faults.py`` with many.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import smuggling
from fault_backend import MALFORMED
from fault_clients import Request, Tally, ask, ask_all, requests
from gateway_process import FaultBackend, Gateway, fault_backend, gateway, until
from redis_server import Redis

from tandem.gateway.keys import new_key, write_keys

AT_REST = ("open_requests", "in_flight_requests", "outstanding_tokens", "reservations", "waiting_requests", "unfinished_body_bytes")
"""Gauges of a gateway that are 0 while nobody asks."""
MANY = {"tenants": {}, "other_tenants": {"limits": {"tokens_per_day": 10**9, "concurrent": 10**6}}}
"""Limits that refuse nothing, so that every request has a reservation."""


@dataclass(frozen=True)
class Row:
    """A fault. ``run(folder, count)``: makes it while about ``count`` requests are sent. ``needs``: a program without which it cannot be made. ``cuts``: it
    breaks streams that nobody can go on with."""

    name: str
    run: Callable[[Path, int], Tally]
    needs: str | None = None
    cuts: bool = False


def leaks(running: Gateway, backends: list[FaultBackend], tasks: float) -> list[str]:
    """Returns what the gateway and its backends still hold after a while in which nobody asks. ``tasks``: those of the gateway before anybody did."""
    process, port = psutil.Process(running.process.pid), int(running.url.rpartition(":")[2])

    def held() -> list[str]:
        left = [f"{name} {value:.0f}" for name in AT_REST if (value := running.metric(name))]
        # The connection and the tasks of the request that asks, and those of a probe.
        left += [f"client_connections {value:.0f}" for value in [running.metric("client_connections")] if value > 1]
        left += [f"tasks {value:.0f} of {tasks:.0f}" for value in [running.metric("tasks")] if value > tasks + 2 * len(backends)]
        sockets = [each for each in process.net_connections() if each.laddr and each.laddr.port == port and each.status != psutil.CONN_LISTEN]
        left += [f"{len(sockets)} sockets of clients"] if len(sockets) > 1 else []
        return left + [f"{backend.name} works at {count}" for backend in backends if (count := backend.stats()["running"])]

    ends = time.monotonic() + 60
    while (left := held()) and time.monotonic() < ends:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def before_two(folder: Path, **settings: object) -> Iterator[tuple[Gateway, FaultBackend, FaultBackend, Tally]]:
    """A gateway before two backends, and the tally of a row, which has at the end what was not given back."""
    tally = Tally()
    with fault_backend("first") as first, fault_backend("second") as second, gateway(folder, [first, second], **{**MANY, **settings}) as running:
        running.wait_ready(first, second)
        tasks = running.metric("tasks")
        yield running, first, second, tally
        if running.process.poll() is None:
            first.process.send_signal(signal.SIGCONT)
            for backend in (first, second):
                if backend.process.poll() is None:
                    backend.mode("ok")
            tally.leaked += leaks(running, [each for each in (first, second) if each.process.poll() is None], tasks)
            tally.note = tally.note or f"{running.metric('retries_total'):.0f} retries"


def _mode(mode: str, delay_s: float = 0.0, **settings: object) -> Callable[[Path, int], Tally]:
    """Returns a row in which one of two backends does what ``mode`` says."""

    def run(folder: Path, count: int) -> Tally:
        with before_two(folder, **settings) as (running, first, _, tally):
            first.mode(mode, delay_s=delay_s)
            asyncio.run(ask_all(running.url, requests(count), tally))
            return tally

    return run


def _signal(number: int) -> Callable[[Path, int], Tally]:
    """Returns a row in which one of two backends gets a signal while some of its streams have begun, and others of its requests not."""

    def run(folder: Path, count: int) -> Tally:
        with before_two(folder, timeouts={"idle_s": 3.0}) as (running, first, second, tally):
            both = (first, second)

            async def turn(mode: str, *backends: FaultBackend) -> None:
                for backend in backends:
                    await asyncio.to_thread(backend.mode, mode, delay_s=0.02)

            async def drive() -> None:
                # Held back, they take turns in getting the streams.
                await turn("gate", *both)
                begun = [Request(f"begun{each}", stream=True) for each in range(count // 2)]
                asked = asyncio.create_task(ask_all(running.url, begun, tally))
                while sum([(await asyncio.to_thread(backend.stats))["running"] for backend in both]) < count // 2:
                    await asyncio.sleep(0.01)
                await turn("stall", first)
                await turn("ok", second)
                while await asyncio.to_thread(running.metric, "time_to_first_byte_seconds_count") < count // 2:
                    await asyncio.sleep(0.01)
                await turn("gate", *both)
                more = asyncio.create_task(ask_all(running.url, requests(count // 2, "more"), tally))
                while await asyncio.to_thread(running.metric, "in_flight_requests") < count // 2:
                    await asyncio.sleep(0.01)
                first.process.send_signal(number)
                await turn("ok", second)
                await asked
                await more
                # What comes afterwards finds the other one.
                await ask_all(running.url, requests(count, "after"), tally)

            asyncio.run(drive())
            return tally

    return run


def dns_changes(folder: Path, count: int) -> Tally:
    """The name of the backend is moved to another address, where another process listens; the first one ends."""
    hosts, tally = folder / f"hosts-{time.monotonic_ns()}", Tally()
    hosts.write_text("127.0.0.1 localhost\n127.0.0.1 backend.test\n")
    within = ["bwrap", "--dev-bind", "/", "/", "--bind", str(hosts), "/etc/hosts"]
    with fault_backend("old") as old:
        port = int(old.url.rpartition(":")[2])
        with fault_backend("new", at=("127.0.0.2", port)) as new:
            listed = [{"url": f"http://backend.test:{port}", "name": "moves"}]
            with gateway(folder, [], within, backends=listed, **MANY) as running:
                until(lambda: running.metric("backend_ready") == 1, "the backend at its first address")
                tasks = running.metric("tasks")
                asyncio.run(ask_all(running.url, requests(count, "before"), tally))
                assert new.seen() == 0
                hosts.write_text("127.0.0.1 localhost\n127.0.0.2 backend.test\n")
                old.process.kill()
                asked_old = count

                async def drive() -> None:
                    # Connections are refused at once at the old address; the name is looked up again when what is known of it is five seconds old.
                    number = 0
                    while not await asyncio.to_thread(new.seen):
                        await ask(running.url, Request(f"between{number}"), tally)
                        number += 1
                        await asyncio.sleep(0.1)
                    until(lambda: running.metric("backend_ready") == 1, "the backend at its other address")
                    await ask_all(running.url, requests(count, "after"), tally)

                asyncio.run(drive())
                tally.note = f"the new address has answered {new.seen()}, the old one {asked_old}"
                tally.leaked += leaks(running, [new], tasks)
    return tally


def redis_dies(folder: Path, count: int) -> Tally:
    """Redis, in which limits are counted, is killed and comes back, again and again."""
    inner = folder / f"redis-{time.monotonic_ns()}"
    inner.mkdir()
    redis = Redis(inner)
    redis.start()
    try:
        with before_two(folder, redis={"url": redis.url, "timeout_s": 5}) as (running, _, _, tally):

            async def drive() -> None:
                for number in range(3):
                    asked = asyncio.create_task(ask_all(running.url, requests(count // 6, f"at{number}-"), tally))
                    await asyncio.to_thread(redis.kill)
                    await asked
                    await ask_all(running.url, requests(count // 6, f"away{number}-"), tally)
                    await asyncio.to_thread(redis.start)

            asyncio.run(drive())
            # What ended while it was away is settled with the next request that finds it back.
            until(lambda: running.complete().status_code == 200 and running.metric("reservations") == 0, "the last reservations to be settled")
        return tally
    finally:
        redis.kill()


def gateway_dies(folder: Path, count: int) -> Tally:
    """The gateway is killed while it passes on ``count`` streams; another one is started in its place."""
    tally = Tally()
    with fault_backend("only") as backend:
        backend.mode("stall")
        with gateway(folder, [backend], backends=[{"url": backend.url, "max_requests": 10**4}]) as running:

            async def drive() -> None:
                streams = [Request(f"open{number}", stream=True) for number in range(count)]
                asked = asyncio.create_task(ask_all(running.url, streams, tally, may_close=True))
                while (await asyncio.to_thread(backend.stats))["running"] < count:
                    await asyncio.sleep(0.02)
                running.process.kill()
                await asked

            asyncio.run(drive())
        until(lambda: backend.stats()["running"] == 0, "the backend to learn it")
        backend.mode("ok")
        with gateway(folder, [backend]) as running:
            tasks = running.metric("tasks")
            asyncio.run(ask_all(running.url, requests(count, "after"), tally))
            tally.leaked += leaks(running, [backend], tasks)
    return tally


def streams_with_disconnects(folder: Path, count: int) -> Tally:
    """``count`` streams at once, of which every second client leaves at a random moment, also before the first token."""
    rng, tally = random.Random(count), Tally()
    with fault_backend("first") as first, fault_backend("second") as second:
        listed = [{"url": backend.url, "name": backend.name, "max_requests": 10**5} for backend in (first, second)]
        with gateway(folder, [], backends=listed, **MANY) as running:
            running.wait_ready(first, second)
            tasks = running.metric("tasks")
            for backend in (first, second):
                backend.mode("gate")

            async def drive() -> None:
                everybody_is_there = asyncio.Event()
                leave_after = [rng.choice([None, rng.randrange(8)]) for _ in range(count)]
                streams = [Request(f"s{number}", True, leave_after=each, may_leave=everybody_is_there) for number, each in enumerate(leave_after)]
                asked = asyncio.create_task(ask_all(running.url, streams, tally))
                # All are at the backends at once, before the first token; then some leave.
                while sum([(await asyncio.to_thread(backend.stats))["running"] for backend in (first, second)]) < count and not asked.done():
                    await asyncio.sleep(0.05)
                at_once = await asyncio.to_thread(running.metric, "in_flight_requests")
                tally.note = f"{at_once:.0f} at once"
                if at_once != count:
                    tally.lost.append(f"{tally.note}, of {count}")
                everybody_is_there.set()
                for backend in (first, second):
                    await asyncio.to_thread(backend.mode, "ok", delay_s=0.01)
                await asked

            asyncio.run(drive())
            tally.leaked += leaks(running, [first, second], tasks)
    return tally


def slow_loris(folder: Path, count: int) -> Tally:
    """``count`` connections that send a byte of a head or of a body now and then, and others that read nothing, beside honest clients."""
    with before_two(folder, request_s=2.0, stall_s=2.0) as (running, _, _, tally):
        host, port = running.url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(count)]
        heads = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        for number, connection in enumerate(slow):
            connection.sendall(heads + (b"Content-Length: 100\r\n\r\n{" if number % 2 else b"X: "))
        ends = threading.Event()

        def crawl() -> None:
            while not ends.wait(0.2):
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.sendall(b" ")

        crawling = threading.Thread(target=crawl)
        crawling.start()
        try:
            asyncio.run(ask_all(running.url, requests(count), tally))
            until(lambda: running.metric("client_connections") <= 1, "the slow connections to be closed")
        finally:
            ends.set()
            crawling.join()
            for connection in slow:
                connection.close()
        tally.note = f"{count} slow connections closed"
        return tally


def oversize(folder: Path, count: int) -> Tally:
    """Heads of 100 KB to 10 MB and bodies larger than allowed, declared and in chunks, beside honest clients."""
    with before_two(folder, max_body_mib=0.1) as (running, first, second, tally):
        seen = first.seen() + second.seen()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        large = [
            head + b"X-A: " + b"a" * 10**5 + b"\r\n\r\n", head + b"X: y\r\n" * 10**5 + b"\r\n", head + b"X-A: " + b"a" * 10**7,
            head + b"Content-Length: 999999999\r\n\r\n{", head + b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n%s\r\n" % (b"x" * 2**16) * 4,
        ]  # fmt: skip
        refusals = [smuggling.send(running.url, each, 1) for each in large for _ in range(max(1, count // 20))]
        tally.note = f"{len(refusals)} too large: {sorted({status for each in refusals for status in each})}"
        if not all(each in ([], [400], [413]) for each in refusals) or first.seen() + second.seen() != seen:
            tally.lost.append(f"too large, and not refused: {refusals}")
        asyncio.run(ask_all(running.url, requests(count), tally))
        return tally


def smuggled(folder: Path, count: int) -> Tally:
    """All requests of ``smuggling`` with two readings, each several times, between honest clients."""
    tally, backend = Tally(), smuggling.RecordingBackend()
    try:
        with gateway(folder, [backend]) as running:  # type: ignore[list-item]
            for name, payload in list(smuggling.REFUSED.items()) * max(1, count // 50):
                statuses = smuggling.send(running.url, payload, 2)
                if statuses not in ([], [400]) or backend.requests:
                    tally.lost.append(f"{name}: {statuses}, {len(backend.requests)} at the backend")
                tally.refused += 1
            for name, (payload, answers, _) in smuggling.COUNTED.items():
                statuses = smuggling.send(running.url, payload, answers)
                tally.answered += 1
                if len(statuses) != answers:
                    tally.lost.append(f"{name}: {statuses}")
            until(lambda: running.metric("open_requests") == 0, "the end of the requests")
            counted = int(running.metric("attempts_total"))
            if counted != len(backend.requests):
                tally.twice.append(f"the backend has seen {len(backend.requests)}, the gateway counted {counted}")
            tally.note = f"{len(backend.requests)} at the backend, {counted} counted"
    finally:
        backend.close()
    return tally


def over_budget(folder: Path, count: int) -> Tally:
    """``4 * count`` requests at once against a budget for ``count`` of them."""
    key, record = new_key("t")
    write_keys(folder / "budget.json", {record.id: record})
    each = 3 + 10
    settings = {"keys_file": str(folder / "budget.json"), "tenants": {"t": {"limits": {"tokens_per_day": count * each}}}}
    with before_two(folder, **settings) as (running, first, second, tally):
        asked = [Request(f"b{number}", words=10, prompt=(1, 2, 3), headers=f"Authorization: Bearer {key}\r\n") for number in range(4 * count)]
        asyncio.run(ask_all(running.url, asked, tally))
        seen = first.seen() + second.seen()
        tally.note = f"budget for {count}: {tally.answered} answered, {seen} at the backends"
        if tally.answered != count or seen != count:
            tally.twice.append(tally.note)
        return tally


def out_of_files(folder: Path, count: int) -> Tally:
    """A gateway that may have few open files, and more clients than that is room for."""
    files = 64 + 2 * max(8, count // 4) + 64
    shell = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"]
    tally = Tally()
    with fault_backend("first") as first, gateway(folder, [first], shell, **MANY) as running:
        assert "open files" in running.log.read_text()
        tasks = running.metric("tasks")
        first.mode("ok", delay_s=0.05)
        # Those for whom there is no room are closed before anything is read.
        asyncio.run(ask_all(running.url, requests(count), tally, may_close=True))
        first.mode("ok")
        tally.note = f"{files} files; {running.metric('attempts_total', outcome='failure'):.0f} attempts failed"
        if running.metric("attempts_total", outcome="failure") or not tally.answered:
            tally.lost.append(tally.note)
        tally.leaked += leaks(running, [first], tasks)
    return tally


def engine_blocks(folder: Path, count: int) -> Tally:
    """Real engines behind the gateway: streams whose clients leave, and a gateway that is killed; then no engine holds a block."""
    from server_process import server
    from tiny_model import make_model, make_tokenizer

    tally = Tally()
    inner = folder / f"engines-{time.monotonic_ns()}"
    inner.mkdir()
    model = make_model(inner / "model", make_tokenizer(inner / "tokenizer"), 0)
    with ExitStack() as stack:
        servers = [stack.enter_context(server(model, inner, "--served-model-name", "m")) for _ in range(2)]
        body = {"model": "m", "prompt": "the quick", "max_tokens": 100, "ignore_eos": True, "temperature": 1}
        with gateway(folder, servers, **MANY) as running:
            until(lambda: running.metric("backend_ready") == 2, "both servers")
            threads = [threading.Thread(target=_stream, args=(running, body, number, tally)) for number in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            until(lambda: running.metric("open_requests") == 0 and running.metric("reservations") == 0, "the gateway to be idle")
            for each in servers:
                each.wait_idle()
            held = [socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) for _ in range(count)]
            for connection in held:
                connection.sendall(_raw({**body, "max_tokens": 400, "stream": True}))
            until(lambda: running.metric("in_flight_requests") > 0, "the streams")
            os.kill(running.process.pid, signal.SIGKILL)
            tally.cut += count
        for each in servers:
            each.wait_idle()
        tally.note = "vllm:kv_cache_usage_perc 0 in both engines"
    return tally


def _raw(body: dict[str, object]) -> bytes:
    import json

    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)


def _stream(running: Gateway, body: dict[str, object], number: int, tally: Tally) -> None:
    """Reads a stream of a real engine; two of three clients leave in the middle."""
    with running.client.stream("POST", running.url + "/v1/completions", json={**body, "stream": True, "seed": number}) as response:
        text = ""
        for part in response.iter_text():
            text += part
            if number % 3 and len(text) > 300 * (number % 7):
                tally.left += 1
                return
        if response.status_code == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text:
            tally.answered += 1
        else:
            tally.lost.append(f"stream {number}: {text[-100:]}")


_WAITS = {"timeouts": {"first_byte_s": 1.0, "idle_s": 1.0}}
ROWS = (
    Row("backend killed", _signal(signal.SIGKILL), cuts=True),
    Row("backend stopped (hung)", _signal(signal.SIGSTOP), cuts=True),
    Row("backend slow", _mode("ok", delay_s=0.1)),
    Row("backend silent", _mode("deaf", **_WAITS)),
    Row("backend silent in its streams", _mode("stall", **_WAITS), cuts=True),
    *(Row(f"backend answers {mode}", _mode(mode)) for mode in ("500", "502", "503", "429")),
    Row("backend answers with invalid HTTP", _mode("garbage")),
    Row("backend resets connections", _mode("reset")),
    Row("backend half-closed in its streams", _mode("half_closed"), cuts=True),
    Row("backend cuts its streams", _mode("cut"), cuts=True),
    Row("backend ends its streams early", _mode("unfinished"), cuts=True),
    Row("backend sends half of what it announces", _mode("truncated")),
    *(Row(f"malformed stream: {mode.replace('_', ' ')}", _mode(mode)) for mode in MALFORMED),
    Row("name of the backend changes its address", dns_changes, needs="bwrap"),
    Row("Redis killed and back, three times", redis_dies, needs="redis-server"),
    Row("gateway killed with open streams", gateway_dies, cuts=True),
    Row("streams with random disconnects", streams_with_disconnects),
    Row("slow loris", slow_loris),
    Row("heads and bodies too large", oversize),
    Row("request smuggling", smuggled),
    Row("requests beyond a budget", over_budget),
    Row("more clients than open files", out_of_files),
    Row("engines, clients that leave, gateway killed", engine_blocks),
)
"""All rows, by what is broken."""


def why_not(row: Row) -> str:
    """Returns why a row cannot be made here, in words; empty if it can."""
    if row.needs is None:
        return ""
    program = shutil.which(row.needs)
    if program is None:
        return f"there is no {row.needs}"
    if row.needs == "bwrap" and subprocess.run([program, "--dev-bind", "/", "/", "true"], capture_output=True).returncode:
        return "bwrap cannot make a namespace here"
    return ""
