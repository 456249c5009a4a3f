"""The pool grows and shrinks by how long requests wait: the policy over loads that are made up, and servers that come and go."""

import asyncio
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from http_processes import until
from server_groups import running_group
from test_gateway_servers import serving

from tandem.cli.main import main
from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.config.servers import ScaleConfig
from tandem.gateway.servers.autoscale import Decision, Load, Since, decide
from tandem.types import UserError

SCALE = {"min_count": 1, "max_count": 8, "target_wait_s": 1.0, "upscale_delay_s": 5.0, "downscale_delay_s": 60.0}


def simulate(
    arrivals: Callable[[float], float], end_s: float, load_s: float = 10.0, each: float = 10.0, count: int = 1, **scale: Any
) -> list[tuple[float, int, int]]:
    """Returns the changes (time, from, to) that follow from ``arrivals`` (requests a second at a time): servers that answer ``each`` requests a second, a
    further one ``load_s`` after it was decided on; a queue, first in, first out."""
    config = build(ScaleConfig, {**SCALE, **scale})
    since, changes, queue, step = Since(), [], list[tuple[float, float]](), 0.1
    ready_at = [0.0] * count
    for tick in range(int(end_s / step)):
        now = tick * step
        if arrivals(now):
            queue.append((now, arrivals(now) * step))
        ready = sum(at <= now for at in ready_at)
        room, served = ready * each * step, 0.0
        while queue and room > 1e-9:
            came, size = queue[0]
            taken = min(room, size)
            room, served = room - taken, served + taken
            queue[0] = (came, size - taken)
            if queue[0][1] <= 1e-9:
                del queue[0]
        waiting = math.ceil(sum(size for _, size in queue) - 1e-6)
        load = Load(now, waiting, now - queue[0][0] if waiting else 0.0, round(served / step), len(ready_at), len(ready_at) - ready)
        since, decision = decide(config, 1000, since, load)
        if decision is not None:
            changes.append((now, len(ready_at), decision.count))
            ready_at = (ready_at + [now + load_s] * decision.count)[: decision.count]
    return changes


def test_a_load_that_stays_is_met_and_nothing_changes_after_that() -> None:
    """35 requests a second need ceil(35 / 10) = 4 servers."""
    changes = simulate(lambda now: 35.0, 600)
    assert [(before, after) for _, before, after in changes] == [(1, 2), (2, 3), (3, 4)], "and the four work off what has waited meanwhile"
    assert changes[0][0] == pytest.approx(1.4 + 5.0, abs=0.3), "at t the oldest has waited (1 - 10 / 35) t, 1 s at 1.4 s; then it must last for 5"


def test_without_load_it_shrinks_one_by_one_to_its_minimum() -> None:
    changes = simulate(lambda now: 0.0, 300, count=4, min_count=2)
    assert [(before, after) for _, before, after in changes] == [(4, 3), (3, 2)]
    assert [when for when, *_ in changes] == pytest.approx([60.0, 120.0], abs=0.3)


@pytest.mark.parametrize("period_s", [4.0, 20.0, 50.0])
def test_a_load_that_comes_and_goes_makes_it_not_flap(period_s: float) -> None:
    """Peaks closer together than ``downscale_delay_s``: after the first ones it stays as large as they need."""
    changes = simulate(lambda now: 28.0 if now % period_s < period_s / 2 else 0.0, 1200)
    assert all(after > before for _, before, after in changes) and len(changes) <= 3
    assert not changes or changes[-1][0] < 200


def test_opposite_changes_are_at_least_a_delay_apart_whatever_the_load() -> None:
    import random

    for seed in range(5):
        draw = random.Random(seed)
        rates = [draw.choice([0.0, 0.0, 5.0, 20.0, 60.0]) for _ in range(200)]
        changes = simulate(lambda now, rates=rates: rates[int(now / 15) % 200], 2000, downscale_delay_s=30.0, min_count=0)  # type: ignore[misc]
        for (before_s, *before), (after_s, *after) in pairwise(changes):
            is_up, was_up = after[1] > after[0], before[1] > before[0]
            assert before[1] == after[0] and 0 <= after[1] <= 8
            assert was_up or after_s - before_s >= 30.0 or (is_up and before[1] == 0) or (is_up and after_s - before_s >= 5.0)
            assert not (was_up and not is_up) or after_s - before_s >= 30.0, "nothing that was started ends before it was idle for the delay"


def test_from_zero_it_starts_at_once_and_as_many_as_the_queue_fills() -> None:
    config = build(ScaleConfig, {**SCALE, "min_count": 0})
    empty = Load(10.0, 0, 0.0, 0, 0, 0)
    assert decide(config, 4, Since(), empty) == (Since(), None)
    _, decision = decide(config, 4, Since(), Load(10.0, 9, 0.01, 0, 0, 0))
    assert decision == Decision(3, "a request waits and there is no server")
    assert decide(config, 4, Since(), Load(10.0, 900, 0.01, 0, 0, 0))[1] == Decision(8, "a request waits and there is no server")
    last = Load(100.0, 0, 0.0, 0, 1, 0)
    assert decide(config, 4, Since(low_s=40.0), last)[1] == Decision(0, "nothing has waited for 60 s and 0 requests are in flight")
    assert decide(config, 4, Since(low_s=40.0), Load(100.0, 0, 0.0, 1, 1, 0))[1] is None, "never with a request in flight"


def test_while_a_server_loads_nothing_is_decided() -> None:
    config = build(ScaleConfig, SCALE)
    assert decide(config, 4, Since(late_s=0.0), Load(100.0, 50, 90.0, 4, 2, 1)) == (Since(), None)
    assert decide(config, 4, Since(late_s=0.0), Load(100.0, 50, 90.0, 4, 2, 0))[1] is not None
    assert decide(config, 4, Since(late_s=0.0, oldest_s=91.0), Load(100.0, 50, 90.0, 4, 2, 0))[1] is None, "the queue gets shorter"
    assert decide(config, 4, Since(late_s=0.0), Load(100.0, 50, 90.0, 4, 8, 0))[1] is None, "max_count"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scale": {"max_count": -1}}, "'servers.scale.max_count' is -1; it must be from 0 to 1024"),
        ({"scale": {"min_count": 3, "max_count": 2}}, "'servers.scale.max_count' is 2, less than 'min_count' (3)"),
        ({"scale": {"target_wait_s": 2}}, "'servers.scale.target_wait_s' is 2.0, which is not read: max_count is 0"),
        ({"scale": {"max_count": 4}, "count": 5}, "'servers.count' is 5; it must be from 1 to 4, as scale says"),
        ({"scale": {"max_count": 4}, "count": 0}, "'servers.count' is 0; it must be from 1 to 4, as scale says"),
        ({"scale": {"max_count": 4, "upscale_delay_s": 0}}, "'servers.scale.upscale_delay_s' is 0.0; it must be above 0"),
        ({"scale": {"max_count": 4, "low_requests": -1}}, "'servers.scale.low_requests' is -1"),
        ({"scale": {"max_count": 3}, "flags": {"device": "cuda"}, "gpus": ["0", "1"]}, "has up to 3 servers with 1 GPUs each, and there is room for 2 "),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"servers": {"m": {"model": "x", **settings}}, "port": 0}))
    assert main(["gateway", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0], lines


def test_servers_come_when_requests_wait_and_none_ends_with_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = {"min_count": 0, "max_count": 2, "target_wait_s": 0.1, "upscale_delay_s": 0.1, "downscale_delay_s": 0.2}

    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, count=0, scale=scale) as running:
            group = running.group
            assert group.are_resting and not group.servers
            running.waits = (1, 0.01)
            await running.until_ready(1)
            assert "servers of m: 1 instead of 0: a request waits and there is no server" in running.said
            held = running.take(group.servers[0])
            running.waits = (3, 5.0)
            await running.until_ready(2)
            assert any("2 instead of 1: the oldest request has waited 5.0 s, 3 wait (target_wait_s: 0.1)" in line for line in running.said)
            other = running.take(group.servers[1])
            running.waits = (0, 0.0)
            await asyncio.sleep(0.5)
            assert group.desired == 2, "two requests are more than one for the server that would stay"
            first, second = group.servers
            other.release()
            await running.until(lambda: group.desired == 1, "the first to go")
            await running.until(lambda: group.servers == [first], "its end")
            assert second.process.poll() is not None and first.process.poll() is None, "the one without a request"
            await asyncio.sleep(0.5)
            assert group.desired == 1 and first.process.poll() is None, "a request is in flight"
            held.release()
            await running.until(lambda: group.are_resting and not group.servers, "rest")
            assert first.process.returncode is not None and group.changes == {"up": 2, "down": 2} and not running.backends
            assert group.coming_s() is not None, "whoever asks"
            await running.until_ready(1)
            assert running.failure is None and group.restarts == 0

    asyncio.run(run())


@pytest.mark.full
def test_a_server_that_is_to_end_finishes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, count=2) as running:
            await running.until_ready(2)
            attempts = [running.take(server) for server in running.group.servers]
            running.group.desired = 1
            await running.until(lambda: len(running.group.ready) == 1, "one to be taken out")
            await asyncio.sleep(0.3)
            leaving = next(server for server in running.group.servers if server.is_leaving)
            assert leaving.process.poll() is None and leaving.backend in running.backends
            for attempt in attempts:
                attempt.release()
            await running.until(lambda: len(running.group.servers) == 1, "its end")
            assert "has ended" in running.said[-1] and running.group.restarts == 0

    asyncio.run(run())


@pytest.mark.full
def test_the_number_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, count=1) as running:
            await running.until_ready(1)
            (first,) = running.group.servers

            def follow(**settings: Any) -> None:
                config = build(GatewayConfig, {"servers": {"m": {"model": "model", **settings}}})
                config.servers["m"].refuse_restart("m", running.group.config)
                running.group.follow(config)

            follow(count=2, max_requests=7)
            await running.until_ready(2)
            assert {backend.config.max_requests for backend in running.backends} == {7}
            follow(count=1, scale={"max_count": 3})
            assert running.group.desired == 2, "within the new range"
            follow(count=1, scale={"max_count": 1})
            await running.until_ready(1)
            assert running.group.servers == [first], "the newest ends"
            for settings, says in (({"flags": {"seed": 1}}, "'servers.m.flags' cannot change"), ({"model": "other"}, "'servers.m.model' cannot change")):
                with pytest.raises(UserError, match=says):
                    follow(**settings)
            with pytest.raises(UserError, match=r"'servers\.new' cannot change"):
                running.group.config.refuse_restart("new", None)

    asyncio.run(run())


@pytest.mark.full
def test_without_a_server_nobody_is_told_to_wait_for_one_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, model="broken") as running:
            await running.until(lambda: running.group.restarts >= 2, "two deaths")
            assert running.group.coming_s() is None

    asyncio.run(run())


@pytest.mark.full
def test_a_real_pool_grows_from_zero_under_load_and_rests_again(tmp_path: Path) -> None:
    """``tandem serve`` processes: the first request waits for the first server, a queue brings the second, no stream is cut, and rest ends both."""
    scale = {"min_count": 0, "max_count": 2, "target_wait_s": 0.5, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
    with serving(tmp_path, count=0, scale=scale, max_requests=2) as running, ThreadPoolExecutor(24) as threads:
        assert running.get("/readiness").status_code == 200, "a pool at rest takes requests"
        assert running.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert running.complete("tiny", max_tokens=2).status_code == 200
        ask = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
        asked = [threads.submit(running.post, "/v1/completions", ask) for _ in range(24)]
        until(lambda: running.metric("servers", state="ready") == 2 or all(each.done() for each in asked), "the second server")
        answers = [each.result() for each in asked]
        assert all(answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text for answer in answers)
        until(lambda: running.metric("servers") == 0 and running.metric("servers_wanted") == 0, "rest")
        (group,) = running.get("/admin/api/state").json()["servers"]
        assert group["wanted"] == 0 and group["max_count"] == 2 and group["restarts"] == 0
        assert [(each["from"], each["to"]) for each in reversed(group["decisions"])][:2] == [(0, 1), (1, 2)]
        assert group["decisions"][-1]["reason"] == "a request waits and there is no server"
        assert "servers of tiny: 2 instead of 1: the oldest request has waited" in running.log.read_text()
        # The gateway knows by now how long a server takes to load.
        late = running.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers={"X-Request-Timeout": "0.05"})
        assert late.status_code == 429 and late.json()["error"]["code"] in ("queue_full", "deadline_exceeded") and int(late.headers["retry-after"]) >= 1
        assert running.complete("tiny", max_tokens=2).status_code == 200
