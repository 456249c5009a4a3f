"""TLS of the gateway's own address."""

import json
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import certificate
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from gateway_process import Gateway, fault_backend, gateway, refusal
from http_processes import until

GOOD = {"cert_file": "server.crt", "key_file": "server.key"}


def encrypted(folder: Path) -> None:
    _, key = certificate(folder, "server")
    form = serialization.BestAvailableEncryption(b"secret")
    (folder / "server.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, form))


@pytest.mark.parametrize(("make", "tls", "says"), [
    (lambda folder: None, GOOD, "server.crt' ('tls.cert_file') cannot be read: No such file or directory"),
    (lambda folder: (folder / "server.key").unlink(), GOOD, "server.key' ('tls.key_file') cannot be read"),
    (lambda folder: shutil.copy(folder / "other.key", folder / "server.key"), GOOD, "is not that of the certificate"),
    (lambda folder: certificate(folder, "server", days=(-3, -1)), GOOD, "has expired; renew it"),
    (lambda folder: certificate(folder, "server", days=(1, 3)), GOOD, "is not valid yet"),
    (lambda folder: (folder / "server.crt").write_bytes(b"\x00not a certificate"), GOOD, "are not a certificate and its key"),
    (encrypted, GOOD, "are not a certificate and its key"),
    (lambda folder: (folder / "none.crt").write_text("x"), {**GOOD, "client_ca_file": "none.crt"}, "('tls.client_ca_file') has no certificates"),
    (lambda folder: None, {"cert_file": "server.crt"}, "'tls' has only one of 'cert_file' and 'key_file'"),
    (lambda folder: None, {"client_ca_file": "server.crt"}, "'tls.client_ca_file' is given without"),
    (lambda folder: None, {**GOOD, "ca_file": "x"}, "'tls.ca_file'"),
])  # fmt: skip
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_files_that_cannot_work_are_one_line(
    make: Callable[[Path], Any], tls: dict[str, str], says: str, check: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "No such file" not in says:
        certificate(tmp_path, "server")
        certificate(tmp_path, "other")
    make(tmp_path)
    assert says in refusal({"tls": tls}, tmp_path, capsys, *check)


def serial(running: Gateway, client: ssl.SSLContext) -> int:
    """Returns the serial number of the certificate that the gateway shows on a new connection."""
    host, port = httpx.URL(running.url).host, httpx.URL(running.url).port
    with socket.create_connection((host, port), 60) as plain, client.wrap_socket(plain) as connection:
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def context(folder: Path, client: str | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=folder / "authority.crt")
    made.check_hostname = False
    if client is not None:
        made.load_cert_chain(folder / f"{client}.crt", folder / f"{client}.key")
    return made


def test_clients_need_a_certificate_and_a_new_one_of_the_gateway_drops_no_stream(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")
    first, _ = certificate(tmp_path, "server", authority)
    certificate(tmp_path, "client", authority)
    certificate(tmp_path, "stranger")
    tls = {name: str(tmp_path / file) for name, file in {**GOOD, "client_ca_file": "authority.crt"}.items()}
    with fault_backend("first") as backend, gateway(tmp_path, [backend], tls=tls) as running:
        good = context(tmp_path, "client")
        assert f"the certificate '{tmp_path / 'server.crt'}' expires in 0 days" in running.log.read_text()
        for name in (None, "stranger"):
            with httpx.Client(verify=context(tmp_path, name), timeout=60) as client, pytest.raises(httpx.TransportError):
                client.get(f"{running.url}/liveness")
        with pytest.raises(httpx.TransportError):
            running.client.get(running.url.replace("https", "http") + "/liveness")
        with httpx.Client(verify=good, timeout=60) as running.client:
            running.wait_ready(backend)
            assert serial(running, good) == first.serial_number
            backend.mode("ok", delay_s=0.5)
            ask = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 200}
            with running.client.stream("POST", f"{running.url}/v1/completions", json=ask) as response:
                parts = response.iter_text()
                text = next(parts)
                # A key of another certificate is refused, and what was there stays in use.
                shutil.copy(tmp_path / "stranger.key", tmp_path / "server.key")
                running.process.send_signal(signal.SIGHUP)
                until(lambda: "the settings stay as they were: the key" in running.log.read_text(), "SIGHUP")
                assert serial(running, good) == first.serial_number
                second, _ = certificate(tmp_path, "server", authority)
                running.process.send_signal(signal.SIGHUP)
                until(lambda: "the settings were read again; tls changed" in running.log.read_text(), "SIGHUP")
                assert serial(running, good) == second.serial_number != first.serial_number
                # Another authority of clients: those of the old one are strangers from now on, with the session of before too.
                old = good
                certificate(tmp_path, "newcomer", certificate(tmp_path, "new authority"))
                shutil.copy(tmp_path / "new authority.crt", tmp_path / "clients.crt")
                file = running.log.with_suffix(".yaml")
                file.write_text(json.dumps({**json.loads(file.read_text()), "tls": {**tls, "client_ca_file": str(tmp_path / "clients.crt")}}))
                assert running.post("/admin/api/reload", {}).json() == {"changed": ["tls"]}
                with httpx.Client(verify=old, timeout=60) as client, pytest.raises(httpx.TransportError):
                    client.get(f"{running.url}/liveness")
                with httpx.Client(verify=context(tmp_path, "newcomer"), timeout=60) as client:
                    assert client.get(f"{running.url}/liveness").status_code == 200
                backend.mode("ok")
                text += "".join(parts)
            assert text.count("data: {") == 200 and text.endswith("data: [DONE]\n\n")
            # Whether there is TLS at all is settled at the start.
            file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != "tls"}))
            os.kill(running.process.pid, signal.SIGHUP)
            until(lambda: "'tls' cannot change while the gateway runs" in running.log.read_text(), "SIGHUP")
        assert running.stop() == 0
