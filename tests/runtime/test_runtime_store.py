import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.store import Conflict, Fenced, Guard, WatchTimeout
from tandem.types import RunError


class Clock:
    """A monotonic clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def embedded(tmp_path, clock):
    opened = EmbeddedStore(tmp_path / "store.sqlite", clock=clock)
    yield opened
    opened.close()


def start_python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_a_key_has_its_newest_value_and_a_growing_revision(store):
    assert store.get("a") is None
    first = store.put("a", b"1")
    second = store.put("b", b"\0\xff")
    third = store.put("a", b"")
    assert 0 < first < second < third
    assert store.get("a") == store.list("a")[0] and store.get("a").value == b""
    assert store.get("b").revision == second and store.get("b").value == b"\0\xff"


def test_a_swap_needs_the_revision_that_stands_there(store):
    revision = store.compare_and_swap("k", None, b"1")
    with pytest.raises(Conflict, match=f"key 'k' is at revision {revision}, not absent"):
        store.compare_and_swap("k", None, b"2")
    newer = store.compare_and_swap("k", revision, b"2")
    with pytest.raises(Conflict) as caught:
        store.compare_and_swap("k", revision, b"3")
    assert caught.value.found == store.get("k") and store.get("k").value == b"2"
    store.delete("k")
    with pytest.raises(Conflict, match="absent"):
        store.compare_and_swap("k", newer, b"4")
    assert store.compare_and_swap("k", None, b"5") > newer


def test_a_guarded_swap_needs_the_guards_revision_too(store):
    leader = store.put("leader", b"one")
    first = store.compare_and_swap("k", None, b"1", guard=Guard("leader", leader))
    newer = store.put("leader", b"two")
    with pytest.raises(Fenced, match=f"guard 'leader' is at revision {newer}, not at revision {leader}"):
        store.compare_and_swap("k", first, b"2", guard=Guard("leader", leader))
    with pytest.raises(Conflict):
        store.compare_and_swap("k", None, b"2", guard=Guard("leader", newer))
    store.delete("leader")
    with pytest.raises(Fenced, match="is absent"):
        store.compare_and_swap("k", first, b"2", guard=Guard("leader", newer))
    assert store.get("k").value == b"1"


def test_a_prefix_lists_its_keys_in_order_and_nothing_else(store):
    for key in ("w/b", "w/a", "w", "x/a", "w/%", "W/a"):
        store.put(key, b"")
    assert [entry.key for entry in store.list("w/")] == ["w/%", "w/a", "w/b"]
    assert len(store.list("")) == 6


def test_delete_says_whether_the_key_was_there(store):
    store.put("a", b"")
    assert store.delete("a") and not store.delete("a") and store.get("a") is None


def test_a_lease_that_nobody_renews_takes_its_keys(store):
    kept, lease = store.grant_lease(60), store.grant_lease(1)
    store.put("stays", b"", kept)
    revision = store.put("member", b"me", lease)
    known = store.list("member")
    assert store.watch_prefix("member", known, 60) == [] and store.get("member") is None
    with pytest.raises(LookupError, match="has expired"):
        store.keep_alive(lease)
    with pytest.raises(LookupError, match="has expired"):
        store.put("x", b"", lease)
    with pytest.raises(LookupError, match="has expired"):
        store.compare_and_swap("x", None, b"", lease)
    store.keep_alive(kept)
    assert store.get("stays") is not None and store.get("x") is None
    assert store.compare_and_swap("member", None, b"you") > revision


def test_a_key_goes_with_its_lease(embedded, clock):
    store = embedded
    lease = store.grant_lease(10)
    store.put("leader", b"me", lease)
    clock.now += 9
    store.keep_alive(lease)
    clock.now += 9
    assert store.get("leader").value == b"me"
    clock.now += 2
    assert store.get("leader") is None and store.list("lead") == []
    store.compare_and_swap("leader", None, b"you")
    with pytest.raises(LookupError, match="has expired"):
        store.keep_alive(lease)
    with pytest.raises(LookupError, match="has expired"):
        store.put("x", b"", lease)
    assert store.get("leader").value == b"you" and store.get("x") is None


def test_a_revoked_lease_takes_its_keys(store):
    lease = store.grant_lease(10)
    store.put("a", b"", lease)
    store.revoke(lease)
    assert store.get("a") is None
    with pytest.raises(ValueError, match="above 0"):
        store.grant_lease(0)


def test_a_lease_of_another_boot_has_run_out(tmp_path, clock):
    before = EmbeddedStore(tmp_path / "store.sqlite", clock=clock)
    before._boot = "the boot before"
    before.put("leader", b"me", before.grant_lease(10**9))
    after = EmbeddedStore(tmp_path / "store.sqlite", clock=clock)
    assert after.get("leader") is None
    before.close()
    after.close()


def test_a_watch_sees_another_process_and_ends_at_its_deadline(store, address):
    revision = store.put("k", b"old")
    code = """
        import sys, time
        from tandem.runtime.coordination.open import open_store
        time.sleep(0.2)
        store = open_store(sys.argv[1])
        store.put("k2", b"another key")
        store.put("k", b"new")
    """
    with start_python(code, address):
        assert store.watch("k", revision, 60).value == b"new"
    with pytest.raises(WatchTimeout, match=r"key 'k' did not change .* within 0\.05 s"):
        store.watch("k", store.get("k").revision, 0.05)


def test_a_watch_of_a_prefix_sees_new_changed_and_deleted_keys_and_no_others(store):
    with pytest.raises(WatchTimeout, match=r"keys under 'members/' did not change within 0\.05 s"):
        store.watch_prefix("members/", [], 0.05)
    store.put("members/a", b"1")
    seen = store.watch_prefix("members/", [], 60)
    assert [(entry.key, entry.value) for entry in seen] == [("members/a", b"1")]
    for change in (lambda: store.put("members/a", b"2"), lambda: store.put("members/b", b""), lambda: store.delete("members/a")):
        timer = threading.Timer(0.05, change)
        timer.start()
        changed = store.watch_prefix("members/", seen, 60)
        timer.join()
        assert changed == store.list("members/") and changed != seen
        seen = changed
    store.put("other", b"")
    with pytest.raises(WatchTimeout):
        store.watch_prefix("members/", seen, 0.05)


@pytest.mark.parametrize("address", ["embedded", pytest.param("etcd", marks=pytest.mark.full)], indirect=True)
def test_of_four_processes_that_swap_none_loses_a_count_nor_counts_twice(store, address):
    code = """
        import sys
        from tandem.runtime.coordination.open import open_store
        from tandem.runtime.coordination.store import Conflict
        store = open_store(sys.argv[1])
        lost = 0
        for _ in range(int(sys.argv[2])):
            while True:
                found = store.get("count")
                try:
                    value = int(found.value) + 1 if found else 1
                    store.compare_and_swap("count", found.revision if found else None, str(value).encode())
                    break
                except Conflict:
                    lost += 1
        print(lost)
    """
    each = 40 if isinstance(store, EmbeddedStore) else 10
    racers = [start_python(code, address, each) for _ in range(4)]
    for racer in racers:
        racer.communicate(timeout=60)
    assert [racer.returncode for racer in racers] == [0] * 4
    assert int(store.get("count").value) == 4 * each


def test_kill_9_in_the_middle_of_writes_leaves_a_whole_store_and_no_lock(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from tandem.runtime.coordination.embedded import EmbeddedStore
        store = EmbeddedStore(Path(sys.argv[1]))
        i = 0
        while True:
            i += 1
            store.put("a", str(i).encode() * 2000)
            if i == 1:
                print("up", flush=True)
    """
    path = tmp_path / "store.sqlite"
    for pause_s in (0.02, 0.05, 0.11):
        with start_python(code, path) as writer:
            writer.stdout.readline()
            time.sleep(pause_s)
            writer.kill()
        store = EmbeddedStore(path, busy_s=1)
        value = store.get("a").value
        assert len(value) % 2000 == 0 and value == value[: len(value) // 2000] * 2000
        store.put("b", b"")
        store.close()


def test_threads_of_one_process_may_share_a_store(store):
    def count():
        for _ in range(25):
            store.put("a", b"")

    threads = [threading.Thread(target=count) for _ in range(4)]
    before = store.put("a", b"")
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    # An etcd counts the changes of all its users.
    assert store.get("a").revision == before + 100 if isinstance(store, EmbeddedStore) else store.get("a").revision >= before + 100


def test_a_file_that_is_no_store_is_one_line(tmp_path):
    (tmp_path / "store.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(RunError, match=r"store\.sqlite is damaged"):
        EmbeddedStore(tmp_path / "store.sqlite")


def test_new_file_that_another_process_is_preparing_is_waited_for(tmp_path: Path) -> None:
    # Without a write-ahead log yet, SQLite itself does not wait for the other's write lock.
    path = tmp_path / "store.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    timer.start()
    store = EmbeddedStore(path)
    timer.join()
    other.close()
    store.put("key", b"value")
    assert store.get("key").value == b"value"
    store.close()
