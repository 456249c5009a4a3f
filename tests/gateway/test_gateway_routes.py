"""Canary and shadow shares, stages of the registry, adapters, and limits of models."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gateway_process import fault_backend, gateway, until
from routing_cases import backends

from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.config.routing import RouteConfig, RouteTarget
from tandem.gateway.backend import Health
from tandem.gateway.keys import new_key, write_keys
from tandem.gateway.pool import Pool
from tandem.gateway.routing.model_routes import ModelRoutes
from tandem.model_registry.local import LocalRegistry
from tandem.model_registry.versions import NewVersion
from tandem.serving.errors import ApiError
from tandem.storage.digests import bytes_digest
from tandem.trainer.checkpoint.format.manifest import Manifest, marker_of
from tandem.types import UserError


def routes(targets: dict[str, float], shadows: dict[str, float] | None = None, stages: dict[str, str] | None = None) -> tuple[ModelRoutes, Pool]:
    made = [backends(1, models=(name,))[0] for name in ("old", "new", "qwen/3")]
    pool = Pool(GatewayConfig(tuple(each.config for each in made)), made)
    listed = [tuple(RouteTarget(*each) for each in group.items()) for group in (targets, shadows or {})]
    return ModelRoutes({"m": RouteConfig(*listed)}, pool, stages or {}), pool


def test_requests_follow_the_shares_and_sessions_stay() -> None:
    one, pool = routes({"old": 0.9, "new": 0.1}, {"qwen/3": 0.25})
    routed = [one.route("m", f"session {number}") for number in range(4000)]
    assert Counter(each.model for each in routed)["new"] / 4000 == pytest.approx(0.1, abs=0.02)
    assert sum(each.shadows == ("qwen/3",) for each in routed) / 4000 == pytest.approx(0.25, abs=0.03)
    assert [one.route("m", f"session {number}") for number in range(4000)] == routed
    assert sum(one.route("m", "").model == "new" for _ in range(2000)) / 2000 == pytest.approx(0.1, abs=0.04), "each request without a session is drawn"
    more, _ = routes({"old": 0.8, "new": 0.2})
    changed = [(before.model, more.route("m", f"session {number}").model) for number, before in enumerate(routed)]
    assert ("new", "old") not in changed, "a larger share moves sessions to the canary and none away from it"
    pool.backends[1].health = Health.DOWN
    assert {one.route("m", f"session {number}").model for number in range(200)} == {"old"}, "a canary that is down takes nothing"
    pool.backends[0].health = Health.DOWN
    assert one.route("m", "a").model in ("old", "new"), "and is refused where nothing is left"


def test_names_that_are_no_route_go_to_the_backends_and_stages_to_their_versions() -> None:
    one, _ = routes({"models/qwen@production": 1.0}, stages={"qwen@production": "qwen/3"})
    assert one.route("m", "").model == one.route("models/qwen@production", "").model == one.route("qwen@production", "").model == "qwen/3"
    assert one.route("old", "").model == "old" and one.route(None, "").model is None
    assert one.models == ("m", "old", "new", "qwen/3")
    for name in ("m", "old", "qwen@production"):
        one.check_model(name)
    with pytest.raises(ApiError, match="there is m, old, new, qwen/3"):
        one.check_model("qwen@staging")


def entry(folder: Path, step: int) -> NewVersion:
    files = folder / f"step-{step}"
    files.mkdir()
    content = Manifest(step, {}, {"of": f"step {step}"}, (), ()).to_json()
    (files / "MANIFEST.json").write_bytes(content)
    (files / "COMMIT").write_bytes(marker_of(content))
    return NewVersion("qwen", str(files), bytes_digest(content), step, "", {}, {}, "")


def test_a_canary_a_shadow_and_a_promotion(tmp_path: Path) -> None:
    """Real processes: shares by session, bodies with the model's own name, a shadow that hangs and is neither waited for nor paid, and traffic that moves with
    ``tandem models promote``."""
    registry = LocalRegistry(tmp_path / "registry", create=True)
    versions = [registry.register(entry(tmp_path, step)) for step in (1, 2)]
    registry.promote(versions[0], "production")
    settings: dict[str, Any] = {
        "registry": str(tmp_path / "registry"), "tenants": {"127.0.0.1": {"limits": {"tokens_per_day": 100_000}}}, "drain_s": 5,
        "routes": {"m": {"targets": [{"model": "models/qwen@production", "share": 0.7}, {"model": "new", "share": 0.3}],
                         "shadows": [{"model": "dark"}]}},
    }  # fmt: skip
    with fault_backend("one", "qwen/1") as one, fault_backend("two", "qwen/2") as two, fault_backend("new", "new") as new, \
            fault_backend("dark", "dark") as dark, gateway(tmp_path, [one, two, new, dark], **settings) as running:  # fmt: skip
        assert {each["id"] for each in running.get("/v1/models").json()["data"]} == {"m", "qwen/1", "qwen/2", "new", "dark"}

        def ask(session: str) -> str:
            response = running.post("/v1/completions", {"model": "m", "prompt": [1, 2], "max_tokens": 1, "who": 1, "user": session, "temperature": 0.25})
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["text"])

        dark.mode("deaf")
        first = {str(number): ask(str(number)) for number in range(40)}
        assert Counter(first.values()).keys() == {"one0 ", "new0 "}, "the shadow answers none of its requests"
        until(lambda: dark.seen() == 40, "the copies")
        copy = dark.stats()["last"]
        body = json.loads(copy["body"])
        assert body["model"] == "dark" and body["temperature"] == 0.25 and copy["headers"]["x-request-id"].endswith("-shadow-0")
        assert json.loads(one.stats()["last"]["body"])["model"] == "qwen/1"
        left = int(running.complete(max_tokens=1).headers["x-ratelimit-remaining-tokens"])
        assert 100_000 - left <= 41 * 4 + 8, "4 tokens for each request, and none for its copy"
        assert running.metric("shadow_requests_total", outcome="success") == 0 and running.metric("in_flight_requests", backend="dark") >= 40
        registry.promote(versions[1], "production")
        until(lambda: "two0 " in {ask(str(number)) for number in range(10)}, "the new version")
        second = {session: ask(session) for session in first}
        assert all(second[session] == {"one0 ": "two0 ", "new0 ": "new0 "}[answer] for session, answer in first.items()), "the canary keeps its sessions"
        dark.process.kill()
        until(lambda: running.metric("shadow_requests_total", model="dark", outcome="failure") >= 40, "the copies to end")
        until(lambda: running.metric("in_flight_requests") == 0, "nothing to be left")
        assert ask("0") and running.metric("requests_total", code="200") > 80 and running.metric("retries_total") == 0


def test_an_adapter_is_asked_for_where_it_is_loaded(tmp_path: Path) -> None:
    with fault_backend("first") as first, fault_backend("second") as second:
        listed = [{"url": each.url, "name": each.name, "models": ["m"]} for each in (first, second)]
        with gateway(tmp_path, [], backends=listed) as running:
            assert running.complete("sql").status_code == 404
            second.mode("ok", adapters={"sql": "m", "other": "unknown"})
            until(lambda: running.complete("sql").status_code == 200, "the adapter to be seen")
            before = first.seen()
            assert {running.complete("sql", who=1, max_tokens=1).json()["choices"][0]["text"] for _ in range(6)} == {"second0 "}
            assert first.seen() == before and running.complete("other").status_code == 404


def test_limits_of_a_model_hold_for_all_and_for_each_tenant(tmp_path: Path) -> None:
    settings = {
        "model_limits": {"m": {"tokens_per_day": 20 * 13}, "busy": {"concurrent": 1}},
        "other_tenants": {"models": {"other": {"requests_per_day": 2}}},
    }
    with fault_backend("only", "m,other,busy") as backend, gateway(tmp_path, [backend], **settings) as running:
        def ask(model: str) -> int:
            return running.post("/v1/completions", {"model": model, "prompt": [1, 2, 3], "max_tokens": 10}).status_code

        with ThreadPoolExecutor(20) as threads:
            assert Counter(threads.map(ask, ["m"] * 50)) == {200: 20, 429: 30}, "a budget of 20 requests of 13 tokens"
        assert [ask("other") for _ in range(3)] == [200, 200, 429]
        assert ask("busy") == 200
        refused = running.post("/v1/completions", {"model": "m", "prompt": [1], "max_tokens": 1})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0


@pytest.mark.parametrize("settings, says", [
    ({"routes": {"m": {"targets": []}}}, "has no 'targets'"),
    ({"routes": {"m": {}}}, "'routes.m.targets' is missing"),
    ({"routes": {"m": {"targets": [{"model": "a", "share": 0}]}}}, "'share' of a is 0"),
    ({"routes": {"m": {"targets": [{"model": "a"}], "shadows": [{"model": "b", "share": 1.5}]}}}, "'share' of b is 1.5; it must be above 0 and at most 1"),
    ({"routes": {"m": {"targets": [{"model": "a"}, {"model": "a"}]}}}, "has a model twice"),
    ({"routes": {"m": {"targets": [{"model": ""}]}}}, "without a model"),
    ({"routes": {"m": {"targets": [{"model": "n"}]}, "n": {"targets": [{"model": "a"}]}}}, "leads to 'n', which is a route itself"),
    ({"model_limits": {"m": {"concurrent": 0}}}, "the limit 'concurrent' is 0"),
    ({"tenants": {"t": {"models": {"m": {"requests_per_day": 0}}}}}, "the limit 'requests_per_day' is 0"),
])  # fmt: skip
def test_routes_that_cannot_work_are_one_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build(GatewayConfig, {"backends": [{"url": "http://a:1"}], **settings})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_one_version_of_the_weights_can_be_asked_for(tmp_path: Path) -> None:
    key, record = new_key("t", models=("m",))
    write_keys(tmp_path / "keys.json", {record.id: record})
    limits = {"keys_file": str(tmp_path / "keys.json"), "model_limits": {"m": {"requests_per_day": 13}}}
    with fault_backend("first", "m", "1") as first, fault_backend("second", "m", "2") as second, gateway(tmp_path, [first, second], **limits) as running:
        headers = {"Authorization": f"Bearer {key}"}
        until(lambda: running.metric("backend_ready") == 2, "both versions")
        [listed] = running.get("/v1/models").json()["data"]
        assert sorted(listed["weight_versions"]) == ["0.1", "0.2"]
        for version, wanted, other in (("0.1", first, second), ("0.2", second, first)):
            before = wanted.seen(), other.seen()
            for stream in (False, True):
                for _ in range(3):
                    ask = {"model": f"m@{version}", "prompt": "x", "stream": stream}
                    assert running.post("/v1/completions", ask, headers=headers).status_code == 200
            assert (wanted.seen(), other.seen()) == (before[0] + 6, before[1])
            assert json.loads(wanted.stats()["last"]["body"])["model"] == "m", "a backend knows no versions in names"
        unknown = running.post("/v1/completions", {"model": "m@0.3", "prompt": "x"}, headers=headers)
        assert unknown.status_code == 404 and unknown.json()["error"]["message"].endswith("there is m@0.1, m@0.2")
        assert running.post("/v1/completions", {"model": "n@0.1", "prompt": "x"}, headers=headers).status_code in (403, 404)
        # A version whose backend is away is not answered with another one, and the versions share the model's limit.
        second.mode("ok", ready=False)
        until(lambda: running.metric("backend_ready") == 1, "the probe")
        statuses = [running.post("/v1/completions", {"model": name, "prompt": "x"}, headers=headers).status_code for name in ("m@0.2", "m@0.1", "m@0.1", "m")]
        assert statuses == [503, 200, 429, 429]
