"""What a gateway follows of its file while it serves, and what the audit log has of its administrators."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx
from gateway_process import fault_backend, gateway
from http_processes import until
from token_issuer import AUDIENCE, Issuer

from tandem.gateway.keys import new_key, write_keys


def test_queue_router_tokens_keys_and_audit_log_are_followed_without_a_dropped_stream(tmp_path: Path) -> None:
    one = Issuer()
    with fault_backend("first", "m", "1") as first, fault_backend("second", "m", "1") as second, gateway(tmp_path, [first, second]) as running:
        file = running.log.with_suffix(".yaml")
        settings = json.loads(file.read_text())
        token = {"Authorization": f"Bearer {one.token()}"}

        def reload(headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
            file.write_text(json.dumps({**settings, **changes}))
            return running.post("/admin/api/reload", {}, headers=headers)

        first.mode("ok", delay_s=0.5)
        second.mode("ok", delay_s=0.5)
        ask = {"model": "m", "prompt": "x" * 600, "stream": True, "max_tokens": 200}
        with running.client.stream("POST", running.url + "/v1/completions", json=ask) as response:
            parts = response.iter_text()
            text = next(parts)
            changes: dict[str, Any] = {"router": {"prefix": 1}}
            assert reload(**changes).json() == {"changed": ["router"]}
            assert running.post("/v1/completions", {**ask, "stream": False, "max_tokens": 1}).status_code == 200
            assert running.metric("prefix_blocks") > 0, "the router of the new settings keeps an index"
            assert reload().json() == {"changed": ["router"]}
            assert running.metric("prefix_blocks") == 0

            [busy] = [each for each in settings["backends"] if running.metric("in_flight_requests", backend=each["name"])]
            narrow = {"backends": [{**busy, "max_requests": 1}], "queue": {"max_waiting": 1, "max_wait_s": 0.2}}
            assert reload(**narrow).json() == {"changed": ["backends", "queue"]}
            refused = running.complete()
            assert refused.status_code == 429 and "0.2 s" in refused.json()["error"]["message"]

            # An issuer that does not answer refuses the change, and nothing has changed.
            away = reload(oidc={"issuer": "http://127.0.0.1:9", "audience": AUDIENCE}, audit_log=str(tmp_path / "none.jsonl"))
            assert away.status_code == 400 and "cannot be read" in away.json()["error"]["message"] and not (tmp_path / "none.jsonl").exists()
            audit = tmp_path / "audit.jsonl"
            changes = {"oidc": {"issuer": one.url, "audience": AUDIENCE}, "audit_log": str(audit)}
            assert reload(**changes).json() == {"changed": ["backends", "queue", "oidc", "audit_log"]}
            assert running.complete().status_code == 401 and running.post("/v1/completions", {**ask, "stream": False}, headers=token).status_code == 200
            first.mode("ok")
            second.mode("ok")
            text += "".join(parts)
        assert text.count("data: {") == 200 and text.endswith("data: [DONE]\n\n"), "the stream that began before all of them"

        # Keys beside tokens, then keys alone: an administrator may read the settings again.
        key, record = new_key("operators", role="admin")
        write_keys(tmp_path / "keys.json", {record.id: record})
        file.write_text(json.dumps({**settings, "audit_log": str(audit), "keys_file": str(tmp_path / "keys.json")}))
        running.process.send_signal(signal.SIGHUP)
        until(lambda: running.post("/v1/completions", {**ask, "stream": False}, headers=token).status_code == 401, "SIGHUP")
        moved = tmp_path / "second.jsonl"
        admin = {"Authorization": f"Bearer {key}"}
        assert reload(admin, audit_log=str(moved), keys_file=str(tmp_path / "keys.json")).json() == {"changed": ["audit_log"]}
        assert running.post("/admin/api/drain", {"backend": "first"}, headers=admin).status_code == 200
        assert running.post("/admin/api/drain", {"backend": "first"}).status_code == 401
        assert running.post("/admin/api/drain", {"backend": "nobody"}, headers=admin).status_code == 404
        user, second_record = new_key("guests")
        write_keys(tmp_path / "keys.json", {record.id: record, second_record.id: second_record})
        until(lambda: "added" in moved.read_text(), "the key file to be followed")
        assert running.post("/admin/api/undrain", {"backend": "first"}, headers={"Authorization": f"Bearer {user}"}).status_code == 403
        assert running.stop() == 0
    one.server.stop()
    before = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {(line["by"], tuple(line["changed"])) for line in before if line.get("action") == "reload" and "by" in line} == {("SIGHUP", ("keys_file", "oidc"))}
    lines = [json.loads(line) for line in moved.read_text().splitlines()]
    acts = [(line.get("tenant"), line.get("key"), line["action"], line.get("backend"), line.get("status")) for line in lines if "action" in line]
    assert acts == [
        ("operators", record.id, "reload", None, 200), ("operators", record.id, "drain", "first", 200), (None, None, "drain", None, 401),
        ("operators", record.id, "drain", None, 404), (None, None, "keys", None, None), ("guests", second_record.id, "undrain", None, 403),
    ]  # fmt: skip
    assert next(line for line in lines if line["action"] == "keys")["added"] == [second_record.id]
    assert key not in moved.read_text() and record.digest not in moved.read_text()
