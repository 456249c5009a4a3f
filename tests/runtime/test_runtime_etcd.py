"""What only a server can do: not answer, restart, lose an answer, refuse, be another one. Each against real etcd."""

import http.client
import http.server
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, free_ports, program, start_cluster

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.etcd import EtcdStore
from tandem.runtime.coordination.etcd_client import Patience, encoded
from tandem.runtime.coordination.store import Conflict
from tandem.types import RunError, UserError

pytestmark = pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that a test may kill."""
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


def opened(config: CoordinationConfig, prefix: str = "/tandem/run/") -> EtcdStore:
    return EtcdStore(config, prefix)


def ask(store: EtcdStore, method: str, **body: object) -> dict[str, object]:
    """Calls etcd's API past the store's interface."""
    return store._client.call(method, body, Patience(30))


class LosesAnswers(http.server.BaseHTTPRequestHandler):
    """Passes calls on to ``server.behind``. The answer to one of which the ``server.loses`` first are left is not returned, as if the network broke then."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        behind = http.client.HTTPConnection(self.server.behind, timeout=30)
        behind.request("POST", self.path, body, {"Content-Type": "application/json"})
        response = behind.getresponse()
        reply = response.read()
        behind.close()
        if self.path in self.server.loses:
            self.server.loses.remove(self.path)
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def lossy(etcd_server: EtcdServer) -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), LosesAnswers)
    server.behind, server.loses = etcd_server.url.removeprefix("http://"), []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_etcd_that_does_not_answer_is_one_line_with_its_endpoints() -> None:
    endpoints = tuple(f"http://127.0.0.1:{port}" for port in free_ports(2))
    waits = list[None]()
    store = EtcdStore(CoordinationConfig(store="etcd", endpoints=endpoints, deadline_s=0.2), "/tandem/run/", lambda: waits.append(None))
    with pytest.raises(RunError, match=rf"etcd at {endpoints[0]}, {endpoints[1]} did not answer within 0\.2 s \(.*refused\); start it, or correct coord"):
        store.get("a")
    assert waits


def test_a_write_whose_answer_was_lost_is_made_once(etcd_server, lossy, tmp_path) -> None:
    config = replace(etcd_server.config(), endpoints=(f"http://127.0.0.1:{lossy.server_port}",))
    store, other = opened(config, f"{tmp_path}/"), opened(etcd_server.config(), f"{tmp_path}/")
    lossy.loses = ["/v3/kv/txn"]
    first = store.compare_and_swap("count", None, b"1")
    assert not lossy.loses and other.get("count").revision == first
    lossy.loses = ["/v3/kv/txn"]
    assert store.delete("count") and other.get("count") is None
    lossy.loses = ["/v3/kv/txn"]
    revision = other.put("count", b"5")
    # Another process writes between the two attempts, so that the first one of this call fails for good.
    with pytest.raises(Conflict, match=f"at revision {revision}, not absent"):
        store.compare_and_swap("count", None, b"5")
    lossy.loses = ["/v3/lease/grant", "/v3/kv/put"]
    store.put("member", b"", store.grant_lease(60))
    assert not lossy.loses and other.get("member") is not None
    assert {entry.key for entry in other.list("")} == {"count", "member"}


def test_callers_wait_for_an_etcd_that_was_killed_and_find_all_of_it_again(own_server) -> None:
    store = opened(own_server.config())
    revision, lease = store.put("a", b"1"), store.grant_lease(60)
    store.put("member", b"", lease)
    seen, waiting = list[object](), threading.Event()
    watcher = EtcdStore(own_server.config(), store.prefix, waiting.set)
    threads = [
        threading.Thread(target=lambda: seen.append(watcher.watch("a", revision, 60).value)),
        threading.Thread(target=lambda: seen.append(store.compare_and_swap("b", None, b"") > revision)),
    ]
    threads[0].start()
    time.sleep(0.1)
    own_server.kill()
    threads[1].start()
    assert waiting.wait(60)
    own_server.start()
    threads[1].join(60)
    store.keep_alive(lease)
    store.put("a", b"2")
    threads[0].join(60)
    assert sorted(map(str, seen)) == ["True", "b'2'"] and store.get("member") is not None


@pytest.mark.full
def test_an_etcd_without_its_data_and_a_second_cluster_are_refused(own_server, etcd_server) -> None:
    store = opened(own_server.config())
    for _ in range(10):
        newest = store.put("a", b"1")
    one, two = f"{store._client.call('maintenance/status', {}, Patience(30))['header']['cluster_id']}", opened(etcd_server.config()).cluster_id
    assert store.cluster_id == f"{int(one):x}"
    own_server.kill()
    shutil.rmtree(own_server.folder / own_server.name)
    own_server.start()
    with pytest.raises(RunError, match=rf"lost what it held: its revision was {newest} and is 1; .* resume the run"):
        store.get("a")
    both = opened(own_server.config(endpoints=(own_server.url, etcd_server.url)))
    both.get("a")
    own_server.kill()
    with pytest.raises(RunError, match=rf"is two clusters, {store.cluster_id} and {two}; name the members of one"):
        both.get("a")


def test_a_compaction_hides_no_change_from_a_watch(etcd_server, tmp_path, monkeypatch) -> None:
    store, other = opened(etcd_server.config(), f"{tmp_path}/"), opened(etcd_server.config(), f"{tmp_path}/")
    revision, look = store.put("a", b"1"), store._get

    def read_then_compact(key: str, deadline: Patience) -> object:
        read = look(key, deadline)
        monkeypatch.setattr(store, "_get", look)
        for value in (b"2", b"3"):
            other.put(key, value)
        ask(other, "kv/compaction", revision=str(other.put("other", b"")), physical=True)
        return read

    monkeypatch.setattr(store, "_get", read_then_compact)
    assert store.watch("a", revision, 60).value == b"3"


def test_another_server_than_etcd_and_the_wrong_scheme_are_one_line(etcd_server, tmp_path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    with pytest.raises(UserError, match=r"answers, but not as etcd 3\.4 or later does \(status 501 "):
        opened(CoordinationConfig(store="etcd", endpoints=(f"http://127.0.0.1:{server.server_port}",), deadline_s=0.2)).get("a")
    server.shutdown()
    server.server_close()
    with pytest.raises(RunError, match=r"did not answer within 0\.2 s .*, as where TLS is not spoken \(http://\)"):
        opened(etcd_server.config(endpoints=(etcd_server.url.replace("http:", "https:"),), deadline_s=0.2)).get("a")
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(UserError, match=r"'coordination\.cacert': .*ca\.pem cannot be used: it is not a certificate"):
        opened(etcd_server.config(endpoints=("https://127.0.0.1:1",), cacert=str(tmp_path / "ca.pem")))


@pytest.mark.full
def test_tls_is_verified(tmp_path) -> None:
    server = EtcdServer(tmp_path / "etcd", scheme="https", options=("--auto-tls",)).start()
    try:
        cacert = str(server.folder / server.name / "fixtures" / "client" / "cert.pem")
        store = opened(server.config(cacert=cacert))
        revision = store.put("a", b"1")
        timer = threading.Timer(0.1, store.put, ("a", b"2"))
        timer.start()
        assert store.watch("a", revision, 60).value == b"2"
        timer.join()
        with pytest.raises(UserError, match=r"the certificate of etcd at https://.* is not valid here: self.signed certificate; correct coordination\.cacert"):
            opened(server.config()).get("a")
        with pytest.raises(RunError, match=r"did not answer within 0\.5 s .*, as where TLS is expected"):
            opened(server.config(endpoints=(server.url.replace("https:", "http:"),), deadline_s=0.5)).get("a")
    finally:
        server.kill()


@pytest.mark.full
def test_users_passwords_and_permissions(own_server, tmp_path) -> None:
    passwords = {name: tmp_path / name for name in ("root", "run", "wrong", "missing")}
    for name in ("root", "run", "wrong"):
        passwords[name].write_text(f"{name}-password\n")
    with pytest.raises(UserError, match="has no authentication; remove user and password_file"):
        opened(own_server.config(user="root", password_file=str(passwords["root"]))).get("a")
    admin = opened(own_server.config())
    for name in ("root", "run"):
        ask(admin, "auth/user/add", name=name, password=f"{name}-password")
        ask(admin, "auth/role/add", name=name)
        ask(admin, "auth/user/grant", user=name, role=name)
    start, end = encoded("/tandem/"), encoded("/tandem0")
    ask(admin, "auth/role/grant", name="run", perm={"permType": "READWRITE", "key": start, "range_end": end})
    ask(admin, "auth/enable")
    with pytest.raises(UserError, match=r"asks for authentication .*; set coordination\.user and coordination\.password_file"):
        admin.get("a")
    store = opened(own_server.config(user="run", password_file=str(passwords["run"])))
    revision = store.compare_and_swap("a", None, b"1")
    with pytest.raises(UserError, match=r"user 'run' has no permission for keys under .* etcdctl role grant-permission ROLE --prefix readwrite"):
        opened(own_server.config(user="run", password_file=str(passwords["run"])), "/elsewhere/").get("a")
    with pytest.raises(UserError, match="refused user 'run': user or password is wrong"):
        opened(own_server.config(user="run", password_file=str(passwords["wrong"]))).get("a")
    with pytest.raises(UserError, match=r"'coordination\.password_file' .*missing cannot be read: No such file"):
        opened(own_server.config(user="run", password_file=str(passwords["missing"]))).get("a")
    # A restart ends etcd's tokens.
    own_server.kill()
    own_server.start()
    assert store.get("a").revision == revision


@pytest.mark.full
def test_a_cluster_goes_on_without_one_member_pauses_without_two_and_goes_on_again(tmp_path) -> None:
    members = start_cluster(tmp_path / "etcd")
    try:
        endpoints = tuple(member.url for member in members)
        store = opened(members[0].config(endpoints=endpoints, deadline_s=120.0))
        lease = store.grant_lease(60)
        store.put("member", b"", lease)
        count = store.put("count", b"0")
        members[0].kill()
        for value in range(20):
            count = store.compare_and_swap("count", count, str(value).encode())
        members[1].kill()
        short = opened(members[0].config(endpoints=endpoints, deadline_s=1.0))
        with pytest.raises(RunError, match=r"did not answer within 1 s"):
            short.put("other", b"may be written when the members are back")
        written = list[int]()
        writer = threading.Thread(target=lambda: written.append(store.compare_and_swap("count", count, b"after")))
        writer.start()
        writer.join(1)
        assert writer.is_alive() and not written
        members[0].start(wait=False)
        writer.join(100)
        assert written and store.get("count").value == b"after"
        store.keep_alive(lease)
        assert store.get("member") is not None
    finally:
        for member in members:
            member.kill()
