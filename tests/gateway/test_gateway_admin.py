"""The administration: who may open it, what it says, and what it changes."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import browser, tab
from gateway_process import FaultBackend, Gateway, fault_backend, gateway
from http_processes import serving_command, until

from tandem.config.gateway import LimitConfig
from tandem.gateway.headers import Headers
from tandem.gateway.keys import KeyRecord, new_key, read_keys, write_keys
from tandem.gateway.local_admin import check_local
from tandem.serving.errors import ApiError

HOST = (b"host", b"127.0.0.1:8080")
JSON = (b"content-type", b"application/json; charset=utf-8")


@pytest.mark.parametrize(
    ("headers", "client", "changes", "says"),
    [
        ([HOST], "127.0.0.1", False, None),
        ([(b"host", b"localhost")], "::1", False, None),
        ([(b"host", b"[::1]:8080"), JSON], "::1", True, None),
        ([HOST, JSON, (b"origin", b"http://127.0.0.1:8080")], "127.0.0.1", True, None),
        # From another machine, or through a proxy which hides it.
        ([HOST], "10.0.0.7", False, "this machine alone"),
        ([HOST], "", False, "this machine alone"),
        ([HOST, (b"x-forwarded-for", b"127.0.0.1")], "127.0.0.1", False, "this machine alone"),
        ([HOST, (b"via", b"1.1 proxy")], "127.0.0.1", False, "this machine alone"),
        # DNS rebinding: the page's own name is still in its requests.
        ([(b"host", b"evil.example:8080")], "127.0.0.1", False, "reached as localhost"),
        ([(b"host", b"127.0.0.1.evil.example")], "127.0.0.1", False, "reached as localhost"),
        ([(b"host", b"127.0.0.1@evil.example")], "127.0.0.1", False, "reached as localhost"),
        ([(b"host", b"[::1")], "127.0.0.1", False, "reached as localhost"),
        ([HOST, HOST], "127.0.0.1", False, "reached as localhost"),
        ([], "127.0.0.1", False, "reached as localhost"),
        # Requests that a page of another origin may send without asking.
        ([HOST], "127.0.0.1", True, "application/json"),
        ([HOST, (b"content-type", b"text/plain")], "127.0.0.1", True, "application/json"),
        ([HOST, JSON, (b"content-type", b"text/plain")], "127.0.0.1", True, "application/json"),
        ([HOST, JSON, (b"origin", b"http://evil.example")], "127.0.0.1", True, "another origin"),
        ([HOST, JSON, (b"origin", b"http://127.0.0.1:3000")], "127.0.0.1", True, "another origin"),
        ([HOST, JSON, (b"origin", b"null")], "127.0.0.1", True, "another origin"),
    ],
)
def test_without_keys_only_this_machine_is_an_administrator(headers: Headers, client: str, changes: bool, says: str | None) -> None:
    if says is None:
        check_local(headers, client, changes=changes)
        return
    with pytest.raises(ApiError, match=says) as refused:
        check_local(headers, client, changes=changes)
    assert refused.value.status == 403


def test_a_drained_backend_finishes_its_streams_and_gets_nothing_new(pair: tuple[Gateway, FaultBackend, FaultBackend]) -> None:
    running, first, second = pair
    for path, body, status in (("drain", {"backend": "nobody"}, 404), ("drain", [1], 400), ("drain", {"backend": ["first"]}, 404), ("sleep", {}, 404)):
        assert running.post(f"/admin/api/{path}", body).status_code == status
    assert running.client.post(f"{running.url}/admin/api/drain", content=b'{"backend": "first"}').status_code == 403, "no page of the web asks so"
    assert running.client.post(f"{running.url}/admin/api/drain", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    first.mode("ok", delay_s=0.02)
    second.mode("ok", ready=False)
    until(lambda: running.metric("backend_ready", backend="second") == 0, "the probe")
    with running.client.stream("POST", running.url + "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, "max_tokens": 40}) as response:
        drained = running.post("/admin/api/drain", {"backend": "first"}).json()
        assert drained["is_drained"] is True and drained["health"] == "ready" and drained["in_flight"] == 1
        assert running.complete().status_code == 503 and running.get("/readiness").status_code == 503
        second.mode("ok")
        running.wait_ready(second)
        before = first.seen()
        assert [running.complete().status_code for _ in range(4)] == [200] * 4 and first.seen() == before
        text = "".join(response.iter_text())
    assert text.count("data: {") == 40 and text.endswith("data: [DONE]\n\n"), "the stream that the backend had"
    state = running.get("/admin/api/state")
    assert state.headers["cache-control"] == "no-store"
    assert {each["name"]: (each["is_drained"], each["in_flight"]) for each in state.json()["backends"]} == {"first": (True, 0), "second": (False, 0)}
    assert running.post("/admin/api/undrain", {"backend": "first"}).json()["is_drained"] is False
    first.mode("ok")
    running.wait_ready(first)
    until(lambda: running.complete().status_code == 200 and first.seen() > before, "the backend to be used again")
    assert "an administrator at 127.0.0.1 drains backend first" in running.log.read_text()


def test_the_file_is_followed_without_a_dropped_stream(tmp_path: Path) -> None:
    with fault_backend("first") as first, fault_backend("second", "m,other") as second, gateway(tmp_path, [first]) as running:
        file = running.log.with_suffix(".yaml")
        settings = json.loads(file.read_text())

        def reload(**changes: Any) -> httpx.Response:
            file.write_text(json.dumps({**settings, **changes}))
            return running.post("/admin/api/reload", {})

        first.mode("ok", delay_s=0.03)
        one, two = settings["backends"][0], {"url": second.url, "name": "second"}
        with running.client.stream("POST", running.url + "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, "max_tokens": 60}) as response:
            parts = response.iter_text()
            text = next(parts)
            assert reload(backends=[{**one, "weight": 3}, two]).json() == {"changed": ["backends"]}
            state = running.get("/admin/api/state").json()["backends"]
            assert [(each["name"], each["weight"], each["in_flight"]) for each in state] == [("first", 3, 1), ("second", 1, 0)], "what stays keeps its load"
            assert running.complete("other").status_code == 200
            # What needs a restart, or is not right, changes nothing.
            for changes, says in (
                ({"backends": [two], "port": 1}, "'port' cannot change while the gateway runs"), ({"backends": [two], "blance": "x"}, "blance"),
                ({"backends": []}, "no backends"), ({"timeouts": {"connect_s": 1}}, "'timeouts.connect_s'"),
                ({"redis": {"prefix": "other"}}, "'redis'"), ({"targets_folder": "other"}, "'targets_folder'"),
                ({"backends": [{**two, "api_key_file": "nothing.txt"}]}, "nothing.txt"),
            ):  # fmt: skip
                refused = reload(**changes)
                assert refused.status_code == 400 and says in refused.json()["error"]["message"], refused.text
            assert [each["name"] for each in running.get("/admin/api/state").json()["backends"]] == ["first", "second"]
            assert reload(backends=[two], balance="round_robin", tenants={"127.0.0.1": {"limits": {"requests_per_day": 3}}}).status_code == 200
            before = first.seen()
            assert [running.complete().status_code for _ in range(4)] == [200, 200, 200, 429] and first.seen() == before
            assert 'backend="first"' not in "".join(line for line in running.get("/metrics").text.splitlines() if "_total" not in line)
            text += "".join(parts)
        assert text.count("data: {") == 60 and text.endswith("data: [DONE]\n\n"), "the stream of a backend that is gone from the file"
        file.write_text(json.dumps({**settings, "backends": [two]}))
        running.process.send_signal(signal.SIGHUP)
        until(lambda: "the settings were read again; balance, tenants changed" in running.log.read_text(), "SIGHUP")
        assert running.complete().status_code == 200
        file.write_text("backends: [")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: "the settings stay as they were: " in running.log.read_text(), "SIGHUP")
        assert running.complete().status_code == 200 and running.stop() == 0


@pytest.mark.full
def test_a_gateway_without_a_file_has_nothing_to_read_again(tmp_path: Path) -> None:
    with fault_backend("only") as only, serving_command(["gateway", "--backends", only.url, "--port", "0"], tmp_path / "log", "gateway at ") as running:
        _, url, client = running
        refused = client.post(f"{url}/admin/api/reload", json={})
        assert refused.status_code == 400 and "without a file of settings" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, dict[str, str]]]:
    """A gateway with keys: `admin`, `user`, and `old`, an administrator's that has expired."""
    folder = tmp_path_factory.mktemp("guarded")
    made = {
        "admin": new_key("operators", role="admin"), "old": new_key("operators", role="admin", expires=1.0),
        "user": new_key("guests", limits=LimitConfig(tokens_per_day=1000)),
    }  # fmt: skip
    write_keys(folder / "keys.json", {record.id: record for _, record in made.values()})
    settings = {"keys_file": str(folder / "keys.json"), "tenants": {"guests": {"limits": {"requests_per_day": 10}}}}
    with fault_backend("first") as first, fault_backend("second") as second, gateway(folder, [first, second], **settings) as running:
        yield running, {name: key for name, (key, _) in made.items()}


def test_with_keys_an_administrator_has_one_of_that_role(guarded: tuple[Gateway, dict[str, str]]) -> None:
    running, keys = guarded

    def ask(key: str | None) -> int:
        return running.get("/admin/api/state", headers={"Authorization": f"Bearer {key}"} if key else {}).status_code

    assert [ask(keys["admin"]), ask(keys["user"]), ask(keys["old"]), ask(None), ask("tk-wrong-wrong")] == [200, 403, 401, 401, 401]
    assert running.complete().status_code == 401
    user_header = {"Authorization": f"Bearer {keys['user']}"}
    assert running.post("/v1/completions", {"model": "m", "prompt": [1] * 3, "max_tokens": 5}, headers=user_header).status_code == 200
    answer = running.get("/admin/api/state", headers={"Authorization": f"Bearer {keys['admin']}"})
    assert not any(key.split("-", 2)[2] in answer.text for key in keys.values()) and "digest" not in answer.text
    state = answer.json()
    user = keys["user"].split("-")[1]
    # Three tokens of the prompt, as the backend says, and five that it wrote.
    assert {(each["who"], each["limit"], each["used"], each["most"]) for each in state["limits"]} == {
        (f"key {user}", "tokens_per_day", 8, 1000), ("tenant guests", "requests_per_day", 1, 10),
    }  # fmt: skip
    assert {(each["tenant"], each["role"], each["is_expired"]) for each in state["keys"]} == {
        ("operators", "admin", False), ("operators", "admin", True), ("guests", "user", False),
    }  # fmt: skip


def test_a_key_file_of_before_has_users(tmp_path: Path) -> None:
    _, record = new_key("one", role="admin")
    path = tmp_path / "keys.json"
    write_keys(path, {record.id: record})
    assert read_keys(path) == {record.id: record}
    content = json.loads(path.read_text())
    del content["keys"][0]["role"]
    path.write_text(json.dumps(content))
    assert read_keys(path)[record.id] == KeyRecord(**{**vars(record), "role": "user"})


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_shows_the_gateway_and_drains_a_backend(guarded: tuple[Gateway, dict[str, str]], scheme: str, width: int) -> None:
    running, keys = guarded
    with browser() as started, tab(started, color_scheme=scheme, viewport={"width": width, "height": 800}) as opened:
        opened.open(f"{running.url}/admin")
        assert opened.page.locator("#key-form").is_visible() and not opened.page.locator("#state").is_visible() and opened.violations() == []
        opened.page.fill("#key", keys["user"])
        opened.page.press("#key", "Enter")
        opened.page.wait_for_function("() => document.querySelector('#notice').textContent.includes('not an administrator')")
        opened.page.fill("#key", keys["admin"])
        opened.page.press("#key", "Enter")
        opened.page.wait_for_selector("#backends td")
        # Chromium writes a line for each of the two refusals.
        assert len(opened.problems) == 2 and all("status of 40" in problem for problem in opened.problems)
        assert opened.texts("#backends .state") == ["ready", "ready"] and opened.violations() == []
        opened.page.get_by_role("button", name="drain first", exact=True).focus()
        opened.page.keyboard.press("Enter")
        opened.page.wait_for_function("() => document.querySelector('#backends .state').textContent === 'drained'")
        assert opened.page.evaluate("() => document.activeElement.textContent") == "Undrain", "the focus stays where it was"
        assert opened.violations() == [] and opened.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        opened.page.keyboard.press("Enter")
        opened.page.wait_for_function("() => document.querySelector('#backends .state').textContent === 'ready'")
        opened.page.get_by_role("button", name="Read the settings again").click()
        opened.page.wait_for_function("() => document.querySelector('#notice').textContent === 'Nothing has changed.'")
        assert opened.violations() == []
        assert len(opened.problems) == 2 and all(address.startswith(running.url) for address in opened.addresses)
