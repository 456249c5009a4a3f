"""Tokens of an OpenID Connect issuer, certificates between gateway and backend, and the audit log."""

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from certificates import certificate
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from gateway_process import FaultBackend, Gateway, gateway, refusal, until
from token_issuer import AUDIENCE, Issuer

from tandem.cli.main import main

PEM = serialization.Encoding.PEM


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    one = Issuer()
    yield one
    one.server.stop()


@pytest.fixture(scope="module")
def guarded(issuer: Issuer, backends: tuple[FaultBackend, FaultBackend], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    oidc = {"issuer": issuer.url, "audience": AUDIENCE, "tenant_claim": "org", "models_claim": "scope_models", "refresh_s": 0.3, "leeway_s": 0}
    limits = {"guests": {"limits": {"requests_per_minute": 1}}}
    with gateway(tmp_path_factory.mktemp("tokens"), backends, oidc=oidc, tenants=limits) as running:
        yield running


def asked(running: Gateway, token: str, model: str = "m") -> httpx.Response:
    return running.post("/v1/completions", {"model": model, "prompt": "x"}, headers={"Authorization": f"Bearer {token}"})


def test_tokens_of_the_issuer_are_taken_and_their_claims_name_tenant_and_models(issuer: Issuer, guarded: Gateway) -> None:
    models = {"scope_models": ["m"]}
    until(lambda: asked(guarded, issuer.token(**models)).status_code == 200, "the issuer's keys")
    assert asked(guarded, issuer.token("two", scope_models="other m")).status_code == 200
    refused = asked(guarded, issuer.token(**models), "other")
    assert refused.status_code == 403 and "it allows m" in refused.json()["error"]["message"]
    assert asked(guarded, issuer.token(scope_models=[])).status_code == 403
    answers = [asked(guarded, issuer.token(org="guests", sub=name, **models)).status_code for name in ("bob", "carol")]
    assert answers == [200, 429], "two people of a tenant share its limit"


def hs256(issuer: Issuer) -> str:
    public = issuer.keys["one"].public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "a", "org": "o", "exp": time.time() + 600}
    header, payload = ({"alg": "HS256", "kid": "one", "typ": "JWT"}, claims)
    parts = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, payload))
    return (parts + b"." + base64.urlsafe_b64encode(hmac.digest(public, parts, hashlib.sha256)).rstrip(b"=")).decode()


def stranger(issuer: Issuer) -> str:
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "a", "org": "o", "exp": time.time() + 600}
    return jwt.encode(claims, rsa.generate_private_key(65537, 2048), "RS256", headers={"kid": "one"})


@pytest.mark.parametrize(("make", "says"), [
    (lambda one: one.token(exp=time.time() - 5), "expired"),
    (lambda one: one.token(exp=None), "no claim 'exp'"),
    (lambda one: one.token(aud="another"), "not made for this service"),
    (lambda one: one.token(aud=None), "no claim 'aud'"),
    (lambda one: one.token(iss="http://elsewhere"), "another issuer"),
    (lambda one: one.token(nbf=time.time() + 500), "not valid"),
    (lambda one: one.token(org=7), "names no tenant"),
    (lambda one: one.token(org="a\nb"), "names no tenant"),
    (lambda one: one.token(scope_models=[1]), "no list of models"),
    (lambda one: one.token()[:-6] + "AAAAAA", "not valid"),
    (lambda one: jwt.encode({"iss": one.url, "aud": AUDIENCE, "org": "o", "exp": 2e9}, None, "none", headers={"kid": "one"}), "not valid"),
    (hs256, "not valid"),
    (stranger, "not valid"),
    (lambda one: "a.b.c", "not valid"),
    (lambda one: "tk-0-0", "missing or wrong"),
])  # fmt: skip
def test_a_token_that_is_not_good_is_refused_with_the_reason(make: Callable[[Issuer], str], says: str, issuer: Issuer, guarded: Gateway) -> None:
    until(lambda: asked(guarded, issuer.token(scope_models=["m"])).status_code == 200, "the issuer's keys")
    answer = asked(guarded, make(issuer))
    assert answer.status_code == 401 and says in answer.json()["error"]["message"], answer.text


def test_a_new_key_of_the_issuer_is_taken_and_a_withdrawn_one_is_not(issuer: Issuer, guarded: Gateway) -> None:
    claims = {"scope_models": ["m"]}
    issuer.keys["three"] = ec.generate_private_key(ec.SECP256R1())
    assert asked(guarded, issuer.token("three", **claims)).status_code == 401
    issuer.listed = ["one", "three"]
    until(lambda: asked(guarded, issuer.token("three", **claims)).status_code == 200, "the new key")
    withdrawn = issuer.token("two", **claims)
    until(lambda: asked(guarded, withdrawn).status_code == 401, "the withdrawn key to be refused")


def test_an_issuer_that_is_away_is_said_and_tokens_are_taken_when_it_is_back(backends: tuple[FaultBackend, FaultBackend], tmp_path: Path) -> None:
    one = Issuer()
    correct, one.configuration = one.configuration, {"issuer": "http://elsewhere", "jwks_uri": "x"}
    with gateway(tmp_path, backends, oidc={"issuer": one.url, "audience": AUDIENCE, "refresh_s": 0.2}) as running:
        answer = asked(running, one.token())
        assert answer.status_code == 503 and "cannot be read now" in answer.json()["error"]["message"] and answer.headers["Retry-After"]
        until(lambda: "names the issuer 'http://elsewhere'" in running.log.read_text(), "the reason in the log")
        one.configuration = correct
        until(lambda: asked(running, one.token()).status_code == 200, "the issuer to be back")
        one.server.stop()
        assert asked(running, one.token()).status_code == 200, "the keys that are known are used while the issuer is away"


def test_the_audit_log_has_a_line_for_each_request_and_neither_prompt_nor_key(
    issuer: Issuer, backends: tuple[FaultBackend, FaultBackend], tmp_path: Path
) -> None:
    log, moved = tmp_path / "audit.jsonl", tmp_path / "audit.1"
    oidc = {"issuer": issuer.url, "audience": AUDIENCE}
    with gateway(tmp_path, backends, audit_log=str(log), oidc=oidc) as running:
        token = issuer.token()
        until(lambda: asked(running, token).status_code == 200, "the issuer's keys")
        until(lambda: '"status": 200' in log.read_text(), "the line of the first request")
        log.rename(moved)
        assert running.post("/v1/completions", {"model": "m", "prompt": "SECRET"}, headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert asked(running, "wrong").status_code == 401
        assert asked(running, token, "nobody's").status_code == 404
        assert running.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["tenant"], line["key"], line["model"], line["status"]) for line in lines] == [
        ("alice", "token alice", "m", 200), (None, None, None, 401), ("alice", "token alice", "nobody's", 404)
    ]
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"], lines[0]["path"]) == (3, 16, "/v1/completions")
    assert "SECRET" not in log.read_text() and token not in log.read_text() and log.stat().st_mode & 0o077 == 0
    assert datetime.datetime.fromisoformat(lines[0]["time"]).tzinfo is not None and moved.read_text().count("\n") >= 1


def test_the_audit_log_has_prompts_where_the_operator_asks_for_them(backends: tuple[FaultBackend, FaultBackend], tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    ask = {"model": "m", "prompt": "SECRET é\n", "max_tokens": 2, "user": None}
    with gateway(tmp_path, backends, audit_log=str(log), audit_prompts=True) as running:
        running.wait_ready(*backends)
        assert f"warning: the audit log '{log}' gets the prompts of all clients (audit_prompts)" in running.log.read_text()
        assert running.post("/v1/completions", ask).status_code == 200
        assert running.post("/v1/completions", {**ask, "model": "nobody's"}).status_code == 404
        assert running.client.post(f"{running.url}/v1/completions", content=b"{").status_code == 400
        assert running.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["status"], line.get("body")) for line in lines] == [(200, ask), (404, {**ask, "model": "nobody's"}), (400, None)]
    assert log.stat().st_mode & 0o077 == 0


def test_check_leaves_no_audit_log(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(json.dumps({"backends": ["http://127.0.0.1:9"], "audit_log": str(tmp_path / "audit.jsonl")}))
    assert main(["gateway", str(tmp_path / "gateway.yaml"), "--check"]) == 1 and not (tmp_path / "audit.jsonl").exists()
    (tmp_path / "audit.jsonl").write_text("a line\n")
    assert main(["gateway", str(tmp_path / "gateway.yaml"), "--check"]) == 1 and (tmp_path / "audit.jsonl").read_text() == "a line\n"


@contextlib.contextmanager
def tls_backend(folder: Path, authority: str) -> Iterator[str]:
    """A server that takes only clients with a certificate of ``authority``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"data": [{"id": "m"}], "choices": [{"text": "hello"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / f"{authority}.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_backend_is_reached_by_mutual_tls_and_neither_side_takes_a_stranger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = certificate(tmp_path, "authority")
    certificate(tmp_path, "stranger")
    for name in ("server", "client"):
        certificate(tmp_path, name, authority)
    with tls_backend(tmp_path, "authority") as url:
        good = {"ca_file": "authority.crt", "cert_file": "client.crt", "cert_key_file": "client.key"}
        cases = {
            "good": good, "no client": {"ca_file": "authority.crt"}, "wrong client": {**good, "cert_file": "stranger.crt", "cert_key_file": "stranger.key"},
            "wrong server": {**good, "ca_file": "stranger.crt"}, "unknown server": {},
        }  # fmt: skip
        found = {}
        for name, files in cases.items():
            (tmp_path / "gateway.yaml").write_text(json.dumps({"backends": [{"url": url, **files}]}))
            found[name] = main(["gateway", str(tmp_path / "gateway.yaml"), "--check"]), capsys.readouterr().out
        assert {name: code for name, (code, _) in found.items()} == {"good": 0, "no client": 1, "wrong client": 1, "wrong server": 1, "unknown server": 1}
        assert "ready, serves m" in found["good"][1] and "certificate" in found["wrong server"][1].lower()
        with gateway(tmp_path, (), backends=[{"url": url, **{k: str(tmp_path / v) for k, v in good.items()}}]) as running:
            assert running.complete().json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(("settings", "line"), [
    ({"oidc": {"issuer": "https://a"}}, "'oidc.audience' is empty"),
    ({"oidc": {"audience": "a"}}, "'oidc.issuer' is empty"),
    ({"oidc": {"issuer": "a", "audience": "b"}}, "write https://HOST/PATH"),
    ({"oidc": {"issuer": "https://a", "audience": "b", "algorithms": ["HS256"]}}, "'oidc.algorithms' has HS256"),
    ({"oidc": {"issuer": "https://a", "audience": "b", "leeway_s": -1}}, "'oidc.leeway_s' is -1"),
    ({"audit_log": "/dev/null/x"}, "cannot be written"),
    ({"audit_log": "missing/audit.jsonl"}, "missing/audit.jsonl' cannot be written: No such file or directory; correct 'audit_log'"),
    ({"audit_prompts": True}, "'audit_prompts' is true without 'audit_log'"),
    ({"keys_file": "missing.json"}, "missing.json"),
    ({"backends": [{"url": "http://a", "ca_file": "x"}]}, "write https://"),
    ({"backends": [{"url": "https://a", "cert_file": "x"}]}, "only one of 'cert_file' and 'cert_key_file'"),
    ({"backends": [{"url": "https://a", "ca_file": "missing.pem"}]}, "does not exist"),
])  # fmt: skip
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_settings_of_tokens_certificates_and_audit_that_cannot_work_are_one_line(
    settings: dict[str, Any], line: str, check: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refusal(settings, tmp_path, capsys, *check)
