"""Calls between pods under TLS: both sides show certificates of one authority, and what cannot be right is one line."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate

from tandem.config.pods import PodsConfig
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import PeerDied, RpcTimeout
from tandem.runtime.rpc.channel import Channel
from tandem.runtime.rpc.http_client import HttpClient
from tandem.runtime.rpc.http_server import HttpServer
from tandem.runtime.rpc.pod_tls import PodTls, RefusedTls, tls_files
from tandem.runtime.tls import TlsFiles
from tandem.types import RunError, UserError

CREDENTIAL = "c0" * 32


def files(folder: Path, name: str, authority: str = "authority") -> TlsFiles:
    return tls_files(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(folder / f"{authority}.crt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates of two pods of one ``authority``, of another authority, and one that has expired."""
    made = tmp_path_factory.mktemp("certificates")
    authority, other = certificate(made, "authority"), certificate(made, "other")
    for name in ("first", "second"):
        certificate(made, name, authority)
    certificate(made, "stranger", other)
    certificate(made, "expired", authority, days=(-3, -1))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    def echo(meta: Any, blobs: Any, progress: Any) -> Any:
        progress({"half": True})
        return meta, {name: bytes(blob) for name, blob in blobs.items()}

    def slow(meta: Any, blobs: Any, progress: Any) -> Any:
        time.sleep(60)
        return {}, {}

    made = HttpServer({"echo": echo, "slow": slow}, CREDENTIAL, name="pod", tls=PodTls(files(folder, "first")))
    made.start()
    yield made
    made.close()


def client(port: int, tls: PodTls | None, credential: str = CREDENTIAL) -> HttpClient:
    return HttpClient("pod 1", port, credential, tls=tls)


def test_calls_of_every_size_are_answered_and_their_bytes_are_not_on_the_wire(folder: Path, server: HttpServer) -> None:
    seen = bytearray()
    port = recorded(server.port, seen)
    own, told = PodTls(files(folder, "second")), list[Any]()
    for size in (0, 1, 2**14, 2**20 + 7, 9 * 2**20):
        sent = b"weights." * (size // 8) + b"w" * (size % 8)
        answer = client(port, own).call("echo", {"size": size}, {"blob": sent}, deadline_s=60, on_progress=told.append)
        assert answer.meta == {"size": size} and bytes(answer.blobs["blob"]) == sent
    assert told == [{"half": True}] * 5
    assert len(seen) > 2 * 10 * 2**20 and CREDENTIAL.encode() not in seen and b"weights.weights." not in seen and b"POST /call" not in seen
    # The recorder sees what is not encrypted.
    with pytest.raises(PeerDied):
        client(port, None).call("echo", deadline_s=20)
    assert CREDENTIAL.encode() in seen


def test_a_call_under_tls_ends_by_its_deadline(folder: Path, server: HttpServer) -> None:
    with pytest.raises(RpcTimeout, match=r"pod 1 is stuck in 'slow': no result within 1.5 s"):
        client(server.port, PodTls(files(folder, "second"))).call("slow", deadline_s=1.5)


def test_a_certificate_alone_does_not_do_without_the_secret(folder: Path, server: HttpServer) -> None:
    with pytest.raises(RunError, match="401 wrong credential"):
        client(server.port, PodTls(files(folder, "second")), "00" * 32).call("echo", deadline_s=20)


def test_a_caller_of_another_authority_is_refused_and_refuses_itself(folder: Path, server: HttpServer) -> None:
    with pytest.raises(RunError, match=r"pod 1 refused the call 'echo': its certificate is not that of a pod .*(issuer|self.signed)"):
        client(server.port, PodTls(files(folder, "stranger", "other"))).call("echo", deadline_s=20)
    # It trusts the server's authority, and is not trusted.
    with pytest.raises(PeerDied, match=r"it closed the connection before it answered, as one does that accepts no certificate|reset by peer|Broken pipe"):
        client(server.port, PodTls(files(folder, "stranger"))).call("echo", deadline_s=20)


def test_a_caller_without_a_certificate_is_refused(folder: Path, server: HttpServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(str(folder / "authority.crt"))
    with socket.create_connection(("127.0.0.1", server.port)) as plain, context.wrap_socket(plain) as connection:
        # The client's side of the handshake is over before the server has asked for what is not shown.
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = connection.recv(1)
        except OSError:
            answer = b""
        assert answer == b""


def test_a_server_without_tls_is_named(folder: Path) -> None:
    plain = HttpServer({}, CREDENTIAL, name="pod")
    plain.start()
    with pytest.raises(RunError, match=r"it does not speak TLS \(.*\); give all machines of the run pods.tls_cert_file, or none"):
        client(plain.port, PodTls(files(folder, "second"))).call("echo", deadline_s=20)
    plain.close()


def test_a_certificate_that_expires_while_it_is_in_use_is_refused_by_the_other_side_and_a_renewed_one_is_taken(folder: Path, tmp_path: Path) -> None:
    for name in ("first", "authority"):
        for end in ("crt", "key"):
            (tmp_path / f"{name}.{end}").write_bytes((folder / f"{name}.{end}").read_bytes())
    served = PodTls(files(tmp_path, "first"))
    running = HttpServer({"echo": lambda meta, blobs, progress: (meta, {})}, CREDENTIAL, name="pod", tls=served)
    running.start()
    own = PodTls(files(folder, "second"))
    assert client(running.port, own).call("echo", {"at": 1}, deadline_s=20).meta == {"at": 1}
    # What an expired file would be at the next start is refused here, and the one before stays.
    copy(folder, "expired", tmp_path, "first")
    assert client(running.port, own).call("echo", {"at": 2}, deadline_s=20).meta == {"at": 2}
    copy(folder, "second", tmp_path, "first")
    assert client(running.port, own).call("echo", {"at": 3}, deadline_s=20).meta == {"at": 3}
    assert served._served._current is not served._served.context, "the renewed certificate is in use"
    running.close()


def test_an_expired_certificate_of_the_other_side_is_named(folder: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(folder / "expired.crt"), str(folder / "expired.key"))
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        try:
            context.wrap_socket(connection, server_side=True)
        except ssl.SSLError:
            connection.close()

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(RunError, match=r"its certificate is not that of a pod \(certificate has expired\)"):
        client(listener.getsockname()[1], PodTls(files(folder, "second"))).call("echo", deadline_s=20)
    listener.close()


def test_a_handshake_that_does_not_end_ends_by_its_deadline(folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(TimeoutError), socket.create_connection(listener.getsockname()) as plain:
        PodTls(files(folder, "second")).connect(plain, Deadline(0.6))
    listener.close()


def test_frames_go_through_a_channel_under_tls_in_both_directions(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    accepted = list[Any]()
    first = PodTls(files(folder, "first"))
    thread = threading.Thread(target=lambda: accepted.append(first.accept(theirs, Deadline(20))))
    thread.start()
    near = Channel(PodTls(files(folder, "second")).connect(ours, Deadline(20)))
    thread.join()
    far, blob = Channel(accepted[0]), bytes(range(256)) * 40_000

    def reply() -> None:
        frame = far.receive(Deadline(60))
        far.send(frame.meta, frame.blobs, kind="result", deadline=Deadline(60))
        far.send({"last": True}, kind="result", deadline=Deadline(60))

    thread = threading.Thread(target=reply)
    thread.start()
    near.send({"a": 1}, {"b": blob, "empty": b""}, kind="call", deadline=Deadline(60))
    frame = near.receive(Deadline(60))
    assert frame.meta == {"a": 1} and bytes(frame.blobs["b"]) == blob and near.receive(Deadline(60)).meta == {"last": True}
    with pytest.raises(TimeoutError):
        near.receive(Deadline(0.5))
    thread.join()
    far.close()
    with pytest.raises((EOFError, OSError)):
        near.receive(Deadline(20))
    near.close()


@pytest.mark.parametrize(
    ("name", "authority", "line"),
    [
        ("missing", "authority", r"missing\.crt' \('pods\.tls_cert_file'\) cannot be read: No such file"),
        ("expired", "authority", r"expired\.crt' \('pods\.tls_cert_file'\) has expired; renew it"),
        ("first", "missing", r"missing\.crt' \('pods\.tls_ca_file'\) cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(name: str, authority: str, line: str, folder: Path) -> None:
    with pytest.raises(UserError, match=line):
        PodTls(files(folder, name, authority))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"tls_cert_file": "a"}, r"'pods\.tls_cert_file' is given without 'pods\.tls_key_file' and 'pods\.tls_ca_file'; pods show each other certificates"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "tls_ca_file": "c", "protocols": ("rdma", "tcp")}, r"pods\.protocols has rdma, which encrypts nothing"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "tls_ca_file": "c", "trainer_count": 2}, r"the sums of gradients between trainer pods are not encrypted"),
    ],
)
def test_keys_of_tls_that_cannot_be_right_are_refused_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        PodsConfig(max_count=2, credential_file="f", **values).check()


def test_a_peer_that_closes_in_the_handshake_is_named(folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
    with pytest.raises((RefusedTls, ConnectionResetError)), socket.create_connection(listener.getsockname()) as plain:
        PodTls(files(folder, "second")).connect(plain, Deadline(20))
    listener.close()


def copy(source: Path, name: str, target: Path, to: str) -> None:
    """Renews a certificate as programs do: each file is replaced at once."""
    for end in ("key", "crt"):
        fresh = target / f"fresh.{end}"
        fresh.write_bytes((source / f"{name}.{end}").read_bytes())
        fresh.replace(target / f"{to}.{end}")


def recorded(port: int, seen: bytearray) -> int:
    """Returns a port that passes connections on to ``port``, and records their bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        try:
            while part := source.recv(2**16):
                seen.extend(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            # Reset by one side: the other one learns of it too, and does not wait for its deadline.
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            near = listener.accept()[0]
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])
