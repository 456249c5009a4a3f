import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.processes import Threads, kill, spawn
from tandem.runtime.rpc.calls import PeerDied, RemoteError, RpcTimeout, WorkerDied
from tandem.runtime.rpc.channel import Channel
from tandem.runtime.rpc.credentials import new_credential, read_credential, write_credential
from tandem.runtime.rpc.http_client import HttpClient
from tandem.runtime.rpc.http_server import HttpServer
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.types import RunError, UserError
from tandem.types.wire import MAGIC, PREFIX, encode

HELPERS = str(Path(__file__).parent / "helpers")
CREDENTIAL = new_credential()


def echo(meta, blobs, progress):
    for i in range(meta.get("progress", 0)):
        progress({"done": i})
    return dict(meta), dict(blobs)


def fail(meta, blobs, progress):
    if meta["kind"] == "WorkerDied":
        raise WorkerDied("rollout worker", "rollout", "rollout worker died while 'rollout' ran: killed by SIGKILL")
    raise {"UserError": UserError, "RunError": RunError, "KeyError": KeyError}[meta["kind"]](meta["text"])


def slow(meta, blobs, progress):
    time.sleep(meta["seconds"])
    return {"slept": meta["seconds"]}, {}


MEETING = threading.Barrier(3)


def meet(meta, blobs, progress):
    """Returns once three calls are running in it."""
    return {"place": MEETING.wait(10)}, {}


METHODS = {"echo": echo, "meet": meet, "fail": fail, "slow": slow, "unspeakable": lambda meta, blobs, progress: ({"x": object()}, {})}


KINDS = {"tcp": (RpcServer, RpcClient), "http": (HttpServer, HttpClient)}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request):
    return request.param


@contextlib.contextmanager
def running(kind):
    server = KINDS[kind][0](METHODS, CREDENTIAL, name="trainer shim", heartbeat_s=0.1, max_body_bytes=2**24)
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(kind):
    with running(kind) as server:
        yield server


@pytest.fixture(scope="module")
def tcp():
    with running("tcp") as server:
        yield server


@pytest.fixture(scope="module")
def web():
    with running("http") as server:
        yield server


@pytest.fixture
def client(server, kind):
    return KINDS[kind][1]("trainer shim", server.port, CREDENTIAL, heartbeat_timeout_s=5)


@pytest.fixture
def shim(kind):
    process = spawn("rpc_shim", [kind], threads=Threads(1), environment={"PYTHONPATH": HELPERS}, stdin=subprocess.PIPE, capture=True)
    process.stdin.write(CREDENTIAL.encode() + b"\n")
    process.stdin.flush()
    yield process, KINDS[kind][1]("trainer shim", int(process.stdout.readline()), CREDENTIAL, heartbeat_timeout_s=2)
    kill(process)
    process.stdin.close()
    process.stdout.close()


def raw(server, data: bytes, shut: bool = False) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(data)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def post(server, body: bytes, credential: str = CREDENTIAL, path: str = "/call/echo") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", path, body, {"Authorization": f"Bearer {credential}"})
    response = connection.getresponse()
    return response.status, response.read()


def greet(server, method: str = "echo", credential: object = CREDENTIAL):
    """Returns a connection to a TCP server that has sent hello, with the reply."""
    connection = socket.create_connection(("127.0.0.1", server.port), 10)
    connection.settimeout(None)
    channel = Channel(connection)
    channel.send({"credential": credential}, kind="hello", method=method)
    return connection, channel, channel.receive(Deadline(10))


def test_a_call_comes_back_with_its_bytes_and_progress(client):
    heard = []
    blobs = {"big": os.urandom(3 * 2**20), "empty": b""}
    reply = client.call("echo", {"x": 0.1, "progress": 3}, blobs, deadline_s=20, on_progress=heard.append)
    assert reply.meta == {"x": 0.1, "progress": 3} and dict(reply.blobs) == blobs
    assert heard == [{"done": 0}, {"done": 1}, {"done": 2}]


def test_heartbeats_carry_a_long_call_past_the_heartbeat_timeout(server, kind):
    patient = KINDS[kind][1]("trainer shim", server.port, CREDENTIAL, heartbeat_timeout_s=1.5)
    assert patient.call("slow", {"seconds": 2.0}, deadline_s=20).meta == {"slept": 2.0}


def test_a_passed_deadline_names_the_side_the_call_and_the_seconds(client):
    with pytest.raises(RpcTimeout, match=r"^trainer shim is stuck in 'slow': no result within 0\.5 s$") as caught:
        client.call("slow", {"seconds": 3}, deadline_s=0.5)
    assert (caught.value.peer, caught.value.call) == ("trainer shim", "slow")


def test_a_stopped_process_is_told_from_a_long_call(shim):
    process, client = shim
    try:
        with pytest.raises(RpcTimeout, match=r"trainer shim is stuck in 'wait': no sign of life for 2 s"):
            client.call("wait", {"seconds": 30}, deadline_s=60, on_progress=lambda p: os.kill(p["pid"], signal.SIGSTOP))
        with pytest.raises(RpcTimeout, match="no sign of life for 2 s"):
            client.call("wait", {"seconds": 0}, deadline_s=60)
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_killed_process_ends_the_wait_at_once(shim):
    process, client = shim
    with pytest.raises(PeerDied, match="trainer shim did not answer 'wait'"):
        client.call("wait", {"seconds": 30}, deadline_s=60, on_progress=lambda p: os.kill(p["pid"], signal.SIGKILL))
    process.wait(10)
    with pytest.raises(PeerDied, match="refused"):
        client.call("wait", {"seconds": 0}, deadline_s=60)


@pytest.mark.parametrize("error", [UserError, RunError])
def test_an_error_for_the_user_comes_back_as_itself(client, error):
    with pytest.raises(error) as caught:
        client.call("fail", {"kind": error.__name__, "text": "'x' is 3; make it 4"}, deadline_s=20)
    assert type(caught.value) is error and str(caught.value) == "'x' is 3; make it 4"


def test_a_dead_worker_comes_through_as_such(client):
    with pytest.raises(WorkerDied, match="killed by SIGKILL") as caught:
        client.call("fail", {"kind": "WorkerDied"}, deadline_s=20)
    assert (caught.value.peer, caught.value.call) == ("rollout worker", "rollout")


def test_a_defect_carries_its_traceback_to_the_log(client, caplog):
    with pytest.raises(RemoteError, match="'fail' raised KeyError in trainer shim"):
        client.call("fail", {"kind": "KeyError", "text": "odd"}, deadline_s=20)
    assert "Traceback" in caplog.text and "in fail" in caplog.text


def test_an_answer_that_is_no_json_is_an_error_not_a_hang(client):
    with pytest.raises(RemoteError, match="not JSON"):
        client.call("unspeakable", deadline_s=20)


WRONG = pytest.mark.parametrize(
    "credential", ["", "wrong", CREDENTIAL[:-1], CREDENTIAL + "0", "é"], ids=["none", "wrong", "too short", "too long", "not ASCII"]
)


@WRONG
def test_a_wrong_credential_is_refused(tcp, credential):
    connection, channel, answer = greet(tcp, credential=credential)
    assert (answer.kind, answer.meta) == ("refused", {"message": "wrong credential"})
    with pytest.raises(EOFError):
        channel.receive(Deadline(10))
    connection.close()
    with pytest.raises(RunError, match="trainer shim refused the call 'echo': wrong credential"):
        RpcClient("trainer shim", tcp.port, credential).call("echo", deadline_s=20)


@WRONG
def test_a_wrong_credential_is_refused_over_http(web, credential):
    head = f"POST /call/echo HTTP/1.0\r\nAuthorization: Bearer {credential}\r\nContent-Length: 0\r\n\r\n"
    assert b" 401 " in raw(web, head.encode()).split(b"\r\n")[0]
    with pytest.raises(RunError, match="trainer shim refused the call 'echo': 401"):
        HttpClient("trainer shim", web.port, "wrong").call("echo", deadline_s=20)


def test_who_has_not_shown_the_credential_is_read_no_further_than_a_hello(tcp):
    for said in ({"credential": None}, {"credential": [CREDENTIAL]}, {}, {"credential": CREDENTIAL, "more": "x" * 5000}):
        connection = socket.create_connection(("127.0.0.1", tcp.port), 10)
        Channel(connection).send(said, kind="hello", method="echo")
        assert b"refused" in connection.recv(4096)
        connection.close()
    assert b"at most 4096 are allowed" in raw(tcp, encode({"credential": CREDENTIAL}, {"x": bytes(5000)}, "hello", "echo"))
    assert b"wrong credential" in raw(tcp, encode({}, {}, "call", "echo"))


def test_a_wrong_credential_is_refused_before_a_large_body_is_read(server, kind):
    with pytest.raises(RunError, match="wrong credential"):
        KINDS[kind][1]("trainer shim", server.port, "wrong").call("echo", {}, {"large": bytes(500_000)}, deadline_s=20)


BROKEN = pytest.mark.parametrize("body", [b"", b"x", b"TDM1" + b"\xff" * 12, encode({}) + b"more", encode({}, {"a": b"abc"})[:-1]])


@BROKEN
def test_a_broken_frame_is_refused_over_http(web, body):
    assert post(web, body)[0] == 400


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET /call/echo HTTP/1.0\r\n\r\n", b"not a frame: it starts with b'GET '"),
        (PREFIX.pack(MAGIC, 10, 2**31), b"2147483648 bytes; at most 16777216 are allowed"),
        (PREFIX.pack(MAGIC, 2**32 - 1, 2**64 - 1), b"at most 16777216 are allowed"),
        (encode({}, {"a": b"abc"})[:-1], b"in the middle of a frame, after "),
        (PREFIX.pack(MAGIC, 2, 0) + b"[]", b"header is not an object"),
        (PREFIX.pack(MAGIC, 2, 0) + b"\xff\xfe", b"header is not JSON"),
    ],
    ids=["http", "2 GiB", "absurd", "torn", "list", "no text"],
)
def test_a_broken_frame_is_refused_in_one_line(tcp, data, problem):
    connection, _, answer = greet(tcp)
    assert answer.kind == "welcome"
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    said = b"".join(iter(lambda: connection.recv(65536), b""))
    assert problem in said and b"refused" in said
    connection.close()
    assert RpcClient("trainer shim", tcp.port, CREDENTIAL).call("echo", {"x": 1}, deadline_s=20).meta == {"x": 1}


def test_an_unknown_call_and_an_unknown_page_are_refused(server, client, web):
    with pytest.raises(RunError, match=r"refused the call 'nothing': .*trainer shim has no call 'nothing'"):
        client.call("nothing", deadline_s=20)
    assert post(web, encode({}), path="/call/nothing")[0] == 404
    assert post(web, encode({}), path="/echo")[0] == 404
    assert raw(web, b"GET /health HTTP/1.0\r\n\r\n").endswith(b"alive\n")


def test_a_body_over_the_limit_or_without_a_length_is_refused(client, web):
    head = f"POST /call/echo HTTP/1.0\r\nAuthorization: Bearer {CREDENTIAL}\r\n"
    assert b" 413 " in raw(web, f"{head}Content-Length: {2**40}\r\n\r\n".encode())
    assert b" 411 " in raw(web, f"{head}\r\n".encode(), shut=True)
    assert b" 400 " in raw(web, f"{head}Content-Length: -1\r\n\r\n".encode())
    with pytest.raises((RunError, PeerDied), match=r"at most 16777216 are allowed|did not answer"):
        client.call("echo", {}, {"large": bytes(2**24 + 1)}, deadline_s=20)


@pytest.mark.parametrize("kind", list(KINDS))
def test_half_open_and_dripping_clients_are_hung_up_on_and_others_are_served(kind):
    server = KINDS[kind][0](METHODS, CREDENTIAL, name="trainer shim", request_s=1.0)
    server.start()
    client = KINDS[kind][1]("trainer shim", server.port, CREDENTIAL)
    head = f"POST /call/echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CREDENTIAL}\r\nContent-Length: 1000\r\n\r\n".encode()
    if kind == "tcp":
        head = encode({"credential": CREDENTIAL}, kind="hello", method="echo")
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    half = socket.create_connection(("127.0.0.1", server.port))
    half.sendall(head + (PREFIX.pack(MAGIC, 100, 100) if kind == "tcp" else b"x"))
    dripping = socket.create_connection(("127.0.0.1", server.port))
    gone = threading.Event()

    def drip():
        try:
            for byte in head:
                dripping.sendall(bytes([byte]))
                time.sleep(0.1)
        except OSError:
            gone.set()

    thread = threading.Thread(target=drip)
    thread.start()
    assert client.call("echo", {"x": 1}, deadline_s=20).meta == {"x": 1}
    for connection in [*silent, half]:
        connection.settimeout(10)
        while connection.recv(1000):
            """Read to the end: the answer to a half call may come before it."""
        connection.close()
    thread.join(20)
    assert gone.is_set()
    dripping.close()
    server.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_more_connections_than_allowed_are_refused_and_those_inside_finish(kind):
    entered, leave = threading.Event(), threading.Event()

    def stay(meta, blobs, progress):
        entered.set()
        return {"left": leave.wait(30)}, {}

    small = KINDS[kind][0]({"stay": stay}, CREDENTIAL, name="trainer shim", max_connections=1, heartbeat_s=0.1)
    small.start()
    client = KINDS[kind][1]("trainer shim", small.port, CREDENTIAL)
    inside = {}
    thread = threading.Thread(target=lambda: inside.update(client.call("stay", deadline_s=60).meta))
    thread.start()
    assert entered.wait(30)
    with pytest.raises((PeerDied, RunError), match=r"did not answer|503"):
        client.call("stay", deadline_s=20)
    leave.set()
    thread.join(30)
    assert inside == {"left": True}
    small.close()


def test_a_taken_port_is_one_line(server, kind):
    with pytest.raises(UserError, match=f"rollout shim: port {server.port} on 127.0.0.1 cannot be taken") as caught:
        KINDS[kind][0]({}, CREDENTIAL, name="rollout shim", port=server.port)
    assert "\n" not in str(caught.value)


def test_calls_run_side_by_side(client):
    replies = []

    def ask():
        replies.append(client.call("meet", deadline_s=20).meta)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(reply["place"] for reply in replies) == [0, 1, 2]


def test_a_credential_is_for_its_owner_only(tmp_path):
    path = tmp_path / "credential"
    write_credential(path, CREDENTIAL)
    assert path.stat().st_mode & 0o777 == 0o600 and read_credential(path) == CREDENTIAL
    path.chmod(0o644)
    with pytest.raises(UserError, match="mode 644"):
        read_credential(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [("", "has 0 characters, which can be guessed"), (" \n", "has 0 characters"), ("hunter2", "has 7 characters"), ("a" * 20 + "\nb", "is not one word")],
)
def test_a_file_without_a_secret_is_refused_with_the_command_that_makes_one(text, line, tmp_path):
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError, match=line) as raised:
        read_credential(path)
    assert f"make one with: (umask 077; openssl rand -hex 32 > {path})" in str(raised.value)


def test_the_control_channel_starts_without_torch():
    code = (
        "import sys, tandem.runtime.rpc.rpc_client, tandem.runtime.rpc.rpc_server, tandem.runtime.rpc.http_client, "
        "tandem.runtime.process.worker, tandem.runtime.records.journal, tandem.runtime.records.metrics, tandem.runtime.records.logs, "
        "tandem.runtime.machine.numerics, tandem.runtime.coordination.embedded, "
        "tandem.weight_transfer.shared_memory, tandem.weight_transfer.publication; "
        "print([m for m in ('torch', 'numpy', 'rich', 'yaml', 'starlette', 'uvicorn', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
