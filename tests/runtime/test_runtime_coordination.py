"""Sessions, election and membership, on the embedded store and on real etcd."""

import subprocess
import sys
import textwrap
import threading

import pytest

from tandem.runtime.coordination.election import NotElected, campaign, leader
from tandem.runtime.coordination.membership import join, leave, members, watch_members
from tandem.runtime.coordination.open import open_store
from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Fenced
from tandem.types import RunError


@pytest.fixture
def sessions(store):
    """Makes sessions of a process each, as far as the store can tell."""
    made = list[Session]()

    def make(lease_s: float = 60.0) -> Session:
        made.append(Session(store, lease_s))
        return made[-1]

    yield make
    for session in made:
        session.close()


def start_process(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_one_leads_the_second_is_refused_and_follows_when_the_first_ends(store, sessions):
    first, second, told = sessions(), sessions(), list[bytes]()
    token = campaign(first, b"one", 1)
    assert token.revision == leader(store).revision and leader(store).value == b"one"
    with pytest.raises(NotElected, match="'one' leads"):
        campaign(second, b"two", 0.05, lambda other: told.append(other.value))
    assert told == [b"one"]
    ends = threading.Timer(0.05, first.close)
    ends.start()
    newer = campaign(second, b"two", 60)
    ends.join()
    assert newer.revision > token.revision and leader(store).value == b"two"


def test_the_writes_of_a_deposed_leader_are_refused(store, sessions):
    first = sessions()
    token = campaign(first, b"one", 1)
    revision = store.compare_and_swap("weights/current", None, b"version 1", guard=token)
    store.revoke(first.lease)  # As after a pause that was longer than the lease.
    with pytest.raises(Fenced, match="guard 'leader' is absent"):
        store.compare_and_swap("weights/current", revision, b"version 2", guard=token)
    newer = campaign(sessions(), b"two", 1)
    with pytest.raises(Fenced, match=f"at revision {newer.revision}, not at revision {token.revision}"):
        store.compare_and_swap("weights/current", revision, b"version 2", guard=token)
    store.compare_and_swap("weights/current", revision, b"version 3", guard=newer)
    assert store.get("weights/current").value == b"version 3"


def test_members_join_are_seen_and_leave(store, sessions):
    one, two = sessions(), sessions()
    first = join(one, "pod-0", {"host": "a", "port": 1})
    with pytest.raises(RunError, match=r"has a member 'pod-0' already \(.*\"host\": \"a\".*\); give this one another name"):
        join(two, "pod-0", {"host": "b"})
    assert members(store) == [first]
    second = join(two, "pod-1", {})
    assert watch_members(store, [first], 60) == [first, second]
    ends = threading.Timer(0.05, two.close)
    ends.start()
    assert watch_members(store, [first, second], 60) == [first]
    ends.join()
    leave(store, "pod-0")
    assert watch_members(store, [first], 60) == []


@pytest.mark.full
def test_what_a_killed_process_held_ends_with_its_lease_and_a_living_one_keeps_it(store, address, sessions):
    code = """
        import sys, time
        from tandem.runtime.coordination.election import campaign
        from tandem.runtime.coordination.membership import join
        from tandem.runtime.coordination.open import open_store
        from tandem.runtime.coordination.session import Session
        session = Session(open_store(sys.argv[1]), 2)
        join(session, "killed", {})
        print(campaign(session, b"killed", 1).revision, flush=True)
        time.sleep(600)
    """
    living = join(sessions(2), "living", {})
    with start_process(code, address) as process:
        token = int(process.stdout.readline())
        killed = next(member for member in members(store) if member.name == "killed")
        process.kill()
    assert watch_members(store, [killed, living], 60) == [living]
    newer = campaign(sessions(), b"next", 60)
    assert newer.revision > token and members(store) == [living]
    other = open_store(address)
    assert leader(other).value == b"next"
    other.close()
