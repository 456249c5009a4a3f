"""What a door in front of engines costs: ours beside HAProxy, sglang-router, vllm-router and LiteLLM's proxy.

The door is pinned to one core; clients and two backends that compute nothing have the other. Chat completions of 16 tokens for a prompt of about 40, whole and
as streams of 16 events. Requests a second with 64 connections that ask again when they are answered, and requests for each CPU second of the door's processes,
which does not depend on what else the machine does; the best of the rounds. Then Tandem's door at a part of what it carries, with requests at random times and
5 ms between tokens: milliseconds that it adds to those without a door.

    python benchmarks/gateway.py [--peers FOLDER] [--seconds 4] [--rounds 3] [--out benchmarks/results]

FOLDER has the environments `litellm` (pip install 'litellm[proxy]==1.80.0') and `router` (pip install sglang-router vllm-router); a peer that is not there is
left out by name. With uvloop and httptools installed, Tandem's door uses them, as LiteLLM's does.
"""

import argparse
import contextlib
import hashlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from gateway_load import KEY
from machine import HERE, machine, write_report

from tandem.gateway.keys import new_key, write_keys

CONNECTIONS, BETWEEN_S = 64, 0.005
DOOR_CORE, OTHER_CORE = 0, 1


@dataclass(frozen=True)
class Door:
    """``command(backends, port, folder)``: starts it. ``why_missing``: empty if it can be started."""

    name: str
    command: Callable[[list[str], int, Path], list[str]]
    why_missing: str = ""


def main() -> None:
    """Write two Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="environments of the peers")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    found: dict[tuple[str, str], tuple[float, float]] = {}
    doors = all_doors(options.peers)
    with tempfile.TemporaryDirectory() as work, stubs(0.0) as backends:
        for _ in range(options.rounds):
            for door in doors:
                if door.why_missing:
                    continue
                with running(door, backends, Path(work)) as (url, process):
                    for kind in ("whole", "stream"):
                        rates = measured(url, process, kind, options.seconds)
                        found[door.name, kind] = tuple(map(max, rates, found.get((door.name, kind), (0.0, 0.0))))
    lines = ["# What a door in front of engines costs", "", machine(), "", __doc__.split("\n\n")[1], "", *table(doors, found)]
    with tempfile.TemporaryDirectory() as work, stubs(BETWEEN_S) as backends, running(doors[0], backends, Path(work)) as (url, process):
        capacity = measured(url, process, "stream", options.seconds)[0]
        lines += ["", *latencies(url, backends[0], capacity, options.seconds)]
    print("\n".join(lines))
    print(f"wrote {write_report('gateway', chr(10).join(lines), options.out)}")


def table(doors: list[Door], found: dict[tuple[str, str], tuple[float, float]]) -> list[str]:
    lines = [
        "| door | whole: requests/s | / CPU s | streams: requests/s | / CPU s | CPU ratio of Tandem, whole | streams |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ours = doors[0].name
    for door in doors:
        if door.why_missing:
            lines.append(f"| {door.name} | {door.why_missing} | | | | | |")
            continue
        (whole, whole_cpu), (stream, stream_cpu) = found[door.name, "whole"], found[door.name, "stream"]
        ratios = [found[ours, kind][1] / theirs if theirs else float("nan") for kind, theirs in (("whole", whole_cpu), ("stream", stream_cpu))]
        lines.append(f"| {door.name} | {whole:,.0f} | {whole_cpu:,.0f} | {stream:,.0f} | {stream_cpu:,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return lines


def latencies(url: str, backend: str, capacity: float, seconds: float) -> list[str]:
    lines = [f"With 5 ms between tokens the door carries {capacity:,.0f} streams a second.", ""]
    lines += ["| load | first token, added ms p50 / p99 | between tokens, added ms p50 / p99 |", "| --- | --- | --- |"]
    for share in (0.5, 0.9):
        rate = share * capacity
        behind, direct = load(url, "open", "stream", rate, 2 * seconds), load(backend, "open", "stream", rate, 2 * seconds)
        added = [[high - low for high, low in zip(milliseconds(behind[kind]), milliseconds(direct[kind]), strict=True)] for kind in ("first_s", "between_s")]
        lines.append(f"| {share:.0%} ({rate:,.0f}/s) | {added[0][0]:.2f} / {added[0][1]:.2f} | {added[1][0]:.2f} / {added[1][1]:.2f} |")
    return lines


def milliseconds(seconds: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    ordered = sorted(seconds)
    return 1e3 * statistics.median(ordered), 1e3 * ordered[int(0.99 * (len(ordered) - 1))]


def measured(url: str, process: psutil.Process, kind: str, seconds: float) -> tuple[float, float]:
    """Requests a second, and for each CPU second of the door."""
    load(url, "closed", kind, CONNECTIONS, 0.5)
    before = cpu_s(process)
    result = load(url, "closed", kind, CONNECTIONS, seconds)
    used = cpu_s(process) - before
    if result["failed"]:
        print(f"{url}: {result['failed']} of {result['answered'] + result['failed']} requests failed", file=sys.stderr)
    return result["answered"] / result["seconds"], result["answered"] / used if used else 0.0


def cpu_s(process: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])


def load(url: str, how: str, kind: str, amount: float, seconds: float) -> Any:
    command = [sys.executable, str(HERE / "gateway_load.py"), url, how, kind, str(amount), str(seconds)]
    done = subprocess.run(pinned(command, OTHER_CORE), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@contextlib.contextmanager
def stubs(between_s: float) -> Iterator[list[str]]:
    """Two backends; gives their addresses."""
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(2):
            command = pinned([sys.executable, str(HERE / "gateway_stub.py"), str(between_s)], OTHER_CORE)
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield urls


@contextlib.contextmanager
def running(door: Door, backends: list[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Runs a door; gives its address and its process."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    log = folder / "door.log"
    with log.open("wb") as sink, subprocess.Popen(pinned(door.command(backends, port, folder), DOOR_CORE), stdout=sink, stderr=sink, cwd=folder) as process:
        try:
            url, ends = f"http://127.0.0.1:{port}", time.monotonic() + 120
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=30).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > ends:
                    sys.exit(f"{door.name} does not answer: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def pinned(command: list[str], core: int) -> list[str]:
    return ["taskset", "-c", str(core), *command]


def all_doors(peers: Path) -> list[Door]:
    """Ours first."""
    litellm, router, haproxy = peers / "litellm/bin/litellm", peers / "router/bin/python", shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    sglang = peers / "router/lib"
    has_router = "" if any(sglang.glob("python*/site-packages/sglang_router")) else "is not installed"
    vllm = peers / "router/bin/vllm-router"
    return [
        Door("tandem gateway", tandem_door),
        Door("tandem gateway, keys and limits", tandem_door_with_keys),
        Door("HAProxy 2.6, one thread", haproxy_door, "" if haproxy else "is not installed"),
        Door("sglang-router", lambda backends, port, folder: [
            str(router.absolute()), "-m", "sglang_router.launch_router", *router_flags(backends, port)
        ], has_router),
        Door("vllm-router", lambda backends, port, folder: [str(vllm.absolute()), *router_flags(backends, port)], "" if vllm.exists() else "is not installed"),
        Door("LiteLLM's proxy", lambda backends, port, folder: litellm_door(litellm, backends, port, folder), "" if litellm.exists() else "is not installed"),
    ]


def router_flags(backends: list[str], port: int) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--worker-urls", *backends]


def tandem_door(backends: list[str], port: int, folder: Path) -> list[str]:
    (folder / "gateway.yaml").write_text(json.dumps({"backends": backends, "port": port, "log_requests": False}))
    return [str(Path(sys.executable).with_name("tandem")), "gateway", "gateway.yaml"]


def tandem_door_with_keys(backends: list[str], port: int, folder: Path) -> list[str]:
    keys = folder / "keys.json"
    keys.unlink(missing_ok=True)
    _, record = new_key("t")
    write_keys(keys, {"000000000000": replace(record, id="000000000000", digest=hashlib.sha256(KEY.encode()).hexdigest())})
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrent": 10**6}
    settings = {"backends": backends, "port": port, "log_requests": False, "keys_file": "keys.json", "tenants": {"t": {"limits": limits}}}
    (folder / "gateway.yaml").write_text(json.dumps(settings))
    return [str(Path(sys.executable).with_name("tandem")), "gateway", "gateway.yaml"]


def haproxy_door(backends: list[str], port: int, folder: Path) -> list[str]:
    servers = "\n".join(f"    server s{i} {url.removeprefix('http://')}" for i, url in enumerate(backends))
    (folder / "haproxy.cfg").write_text(
        "global\n    nbthread 1\n    maxconn 4000\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 300s\n    timeout server 300s\n"
        f"    option http-no-delay\nfrontend f\n    bind 127.0.0.1:{port}\n    default_backend b\nbackend b\n    balance leastconn\n{servers}\n"
    )
    return ["/usr/sbin/haproxy", "-f", "haproxy.cfg"]


def litellm_door(program: Path, backends: list[str], port: int, folder: Path) -> list[str]:
    models = [{"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "x"}} for url in backends]
    settings = {"model_list": models, "litellm_settings": {"telemetry": False, "num_retries": 0}}
    (folder / "litellm.yaml").write_text(json.dumps(settings))
    offline = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR"]
    return [*offline, str(program.absolute()), "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


if __name__ == "__main__":
    main()
