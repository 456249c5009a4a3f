"""The configurations of load balancers in front of several gateways, with the real HAProxy, nginx and Envoy."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from gateway_process import FaultBackend, Gateway, end, gateway, until

from tandem.cli.main import main

_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/usr/sbin"
PROGRAMS = {kind: shutil.which(kind, path=_PATH) for kind in ("envoy", "haproxy", "nginx")}
KINDS = [pytest.param(kind, marks=pytest.mark.skipif(program is None, reason=f"{kind} is not installed")) for kind, program in PROGRAMS.items()]
MIB = 2**20


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def balancer(kind: str, text: str, port: int, folder: Path) -> Iterator[str]:
    """Runs the real ``kind`` with the configuration ``text``; gives its address."""
    program = PROGRAMS[kind]
    assert program is not None
    file, log = folder / f"{kind}.yaml", folder / f"{kind}.log"
    file.write_text(text)
    if kind == "nginx":
        file = folder / "nginx.conf"
        here = "".join(f"{each}_temp_path {folder}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        file.write_text(f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}} http {{ access_log off; {here} include {kind}.yaml; }}")
    command = {
        "envoy": [program, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warn"],
        "haproxy": [program, "-f", str(file)], "nginx": [program, "-c", str(file), "-p", str(folder)],
    }[kind]  # fmt: skip
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            url = f"http://127.0.0.1:{port}"

            def answers() -> bool:
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{url}/readiness", timeout=5).status_code == 200
                return False

            until(answers, f"{kind} to answer")
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            end(process)


def emitted(kind: str, file: Path, gateways: list[Gateway], port: int, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    urls = ",".join(each.url for each in gateways)
    assert main(["gateway", str(file), "--emit", kind, "--gateways", urls, "--port", str(port)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_streams_long_bodies_and_the_death_of_a_gateway_pass_through_the_load_balancer(
    kind: str, backends: tuple[FaultBackend, FaultBackend], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, port = tmp_path / "gateway.yaml", free_port()
    file.write_text(yaml.safe_dump({"backends": ["http://127.0.0.1:9"], "max_body_mib": 1}))
    settings = {"max_body_mib": 1, "trusted_proxies": ["127.0.0.0/8"]}
    with contextlib.ExitStack() as stack:
        one, two, three = (stack.enter_context(gateway(tmp_path, backends, **settings)) for _ in range(3))
        url = stack.enter_context(balancer(kind, emitted(kind, file, [one, two, three], port, capsys), port, tmp_path))
        client = stack.enter_context(httpx.Client(timeout=30))
        named = {"X-Forwarded-For": "198.51.100.7"}
        body = {"model": "m", "prompt": "x" * 220_000, "stream": True, "max_tokens": 4}
        with client.stream("POST", f"{url}/v1/completions", json=body, headers=named) as response:
            assert response.status_code == 200
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        for backend in backends:
            backend.mode("stall")
        # The tokens that were made arrive, though the answer never ends.
        with client.stream("POST", f"{url}/v1/completions", json=body, headers=named) as response:
            lines = (line for line in response.iter_lines() if line)
            assert ["choices" in next(lines) for _ in range(2)] == [True, True]
        for backend in backends:
            backend.mode("ok")
        sent = [backend.stats()["last"]["headers"]["x-forwarded-for"] for backend in backends if backend.stats()["last"]]
        assert any(value.startswith("198.51.100.7,") for value in sent), sent
        too_large = client.post(f"{url}/v1/completions", json={"model": "m", "prompt": "x" * 2 * MIB})
        assert too_large.status_code == 413
        one.process.kill()
        one.process.wait()
        # All find the others, but for one that may be sent on a connection of which the balancer has not heard yet that it is broken.
        answers = [client.post(f"{url}/v1/completions", json={"model": "m", "prompt": str(number)}) for number in range(20)]
        assert sum(answer.status_code == 200 for answer in answers) >= 19, [answer.text[-300:] for answer in answers]
        for each in (two, three):
            each.process.kill()
            each.process.wait()
        began = time.monotonic()
        assert client.post(f"{url}/v1/completions", json={"model": "m", "prompt": "x"}).status_code in (502, 503)
        assert time.monotonic() - began < 30


def test_the_client_of_a_trusted_proxy_is_the_one_it_names_and_of_no_other(backends: tuple[FaultBackend, FaultBackend], tmp_path: Path) -> None:
    limits = {"other_tenants": {"limits": {"requests_per_minute": 1}}}
    for trusted, expected in (((), [200, 429, 429]), (("127.0.0.1",), [200, 200, 429]), (("10.0.0.0/8",), [200, 429, 429])):
        with gateway(tmp_path, backends, trusted_proxies=list(trusted), **limits) as running:
            clients = ("198.51.100.1", "198.51.100.2", "198.51.100.2")
            sent = [running.post("/v1/completions", {"model": "m", "prompt": "x"}, headers={"X-Forwarded-For": client}) for client in clients]
            assert [answer.status_code for answer in sent] == expected


@pytest.mark.parametrize(("arguments", "line"), [
    (["--emit", "nginx"], "--emit needs --gateways"),
    (["--gateways", "http://a:1"], "--gateways is for --emit"),
    (["--emit", "nginx", "--gateways", ","], "--gateways has 0 addresses"),
    (["--emit", "nginx", "--gateways", "http://a:1,http://a:1"], "names 'http://a:1' twice"),
    (["--emit", "nginx", "--gateways", "http://a:1,https://b:1"], "give one kind"),
    (["--emit", "nginx", "--gateways", "http://a;b:1"], "write http://HOST:PORT"),
    (["--emit", "nginx", "--gateways", "http://a:x"], "which is not a URL"),
    (["--emit", "nginx", "--gateways", "http://a:1", "--port", "0"], "'port' is 0"),
])  # fmt: skip
def test_what_no_load_balancer_can_be_told_is_one_line(arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("backends: ['http://127.0.0.1:9']\n")
    assert main(["gateway", str(file), *arguments]) == 2
    assert line in capsys.readouterr().err
