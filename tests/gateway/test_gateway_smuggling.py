"""No backend sees a request that the gateway has not counted, and no client an answer that is not its own."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import smuggling
from gateway_process import Gateway, gateway, until
from smuggling import COUNTED, EITHER, REFUSED, RecordingBackend, send, what_is_wrong


@pytest.fixture
def recording() -> Iterator[RecordingBackend]:
    backend = RecordingBackend()
    yield backend
    backend.close()


def check(running: Gateway, backend: RecordingBackend) -> None:
    """Sends all the requests, each on a connection of its own."""
    for name, payload in REFUSED.items():
        statuses = send(running.url, payload, 2)
        assert statuses in ([], [400]), (name, statuses)
        assert not backend.requests, name
    for name, (payload, answers, count) in {**COUNTED, **EITHER}.items():
        before = len(backend.requests)
        statuses = send(running.url, payload, answers)
        # The answer begins before its end is counted.
        until(lambda: running.metric("attempts_total") == len(backend.requests), f"the count of {name}")
        seen = backend.requests[before:]
        assert (len(statuses) == answers and len(seen) == count) or (name in EITHER and statuses[-1:] in ([400], [404])), (name, statuses, seen)
        assert not [wrong for head, body in seen for wrong in what_is_wrong(head, body)], (name, seen)
    assert running.metric("attempts_total") == running.metric("requests_total") == len(backend.requests)
    until(lambda: running.metric("client_connections") == 1, "the connections to be closed")
    assert running.metric("open_requests") == running.metric("reservations") == 0


def test_no_backend_sees_a_request_that_was_not_counted(recording: RecordingBackend, tmp_path: Path) -> None:
    with gateway(tmp_path, [recording]) as running:  # type: ignore[list-item]
        check(running, recording)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("httptools") is None, reason="httptools is not installed: the other parser is tested")
def test_no_backend_sees_a_request_that_was_not_counted_by_httptools(recording: RecordingBackend, tmp_path: Path) -> None:
    with gateway(tmp_path, [recording]) as running:  # type: ignore[list-item]
        assert "httptools" in Path(f"/proc/{running.process.pid}/maps").read_text()
        check(running, recording)


def test_what_a_backend_says_unasked_is_nobodys_answer(recording: RecordingBackend, tmp_path: Path) -> None:
    recording.afterwards = smuggling.OTHER_ANSWER
    with gateway(tmp_path, [recording]) as running:  # type: ignore[list-item]
        for number in range(1, 6):
            recording.said.clear()
            assert json.loads(running.complete().content)["choices"][0]["text"] == number
            assert recording.said.wait(60)
            # What came unasked is in the gateway's socket by now; two looks at its figures let it read it.
            running.metric("open_requests"), running.metric("open_requests")
        until(lambda: running.metric("backend_connections", state="busy") == 0, "idle connections")
