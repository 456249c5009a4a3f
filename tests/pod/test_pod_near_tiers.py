"""The keepers of a run, as its controller finds them: that of a pod that joined is in the store on its lease, takes checkpoints under TLS, and is on
another node only if its address is another."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificate

from tandem.jobs.tiers_of_run import kept_elsewhere
from tandem.pod.joined_keeper import JoinedKeeper
from tandem.pod.near_tiers import KEEPERS, NearTiers
from tandem.report.run_facts import NODE_KEY
from tandem.runtime.coordination.open import open_store
from tandem.runtime.coordination.session import Session
from tandem.runtime.records.checkpoint_tiers import record_written
from tandem.runtime.records.journal import Journal
from tandem.runtime.rpc.credentials import new_credential
from tandem.runtime.rpc.pod_tls import PodTls, tls_files
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcess
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.memory.launched_keepers import launched_keepers, remove_keeper, write_keeper
from tandem.types import RunError

SECRET = new_credential()


def files_of(folder: Path, name: str, authority: str = "authority") -> tuple[str, ...]:
    return tuple(str(folder / file) for file in (f"{name}.crt", f"{name}.key", f"{authority}.crt"))


@pytest.fixture
def near(tmp_path: Path) -> Iterator[NearTiers]:
    """The controller's keeper at 127.0.0.1, and that of pod ``a`` at 127.0.0.2, on a session's lease."""
    authority = certificate(tmp_path, "authority")
    for name in ("run", "a"):
        certificate(tmp_path, name, authority)
    address = str(tmp_path / "store.sqlite")
    store = open_store(address)
    session = Session(store, 5.0)
    process = KeeperProcess("a", tmp_path / "a", SECRET, host="127.0.0.2", tls=files_of(tmp_path, "a"))
    joined = JoinedKeeper("a", "127.0.0.2", process.start, session)
    made = NearTiers(
        KeeperProcess("home", tmp_path, SECRET, tls=files_of(tmp_path, "run")), 1, SECRET, open_store=lambda: open_store(address), joined=lambda: ["a"]
    )
    ends = time.monotonic() + 60
    while store.get(KEEPERS + "a") is None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    yield made
    made.close()
    joined.close()
    process.close()
    session.close()


def test_the_keeper_of_another_machine_is_found_and_takes_the_copy_under_tls(near: NearTiers, tmp_path: Path) -> None:
    told = near.describe()["memory"]
    assert [(keeper["name"], keeper["node"], keeper["is_encrypted"]) for keeper in told["keepers"]] == [
        ("home", "127.0.0.1", True), ("a", "127.0.0.2", True),
    ]  # fmt: skip
    keepers = Keepers.of(told, 0, PodTls(tls_files(*files_of(tmp_path, "run"))))
    assert keepers.places == (0, 1)
    content = bytes(range(256)) * 1000
    assert keepers.put(3, {"part": content}) == [0, 1]
    keepers.commit(3, {"COMMIT": b"whole"})
    assert keepers.held() == {3: {0: ["COMMIT", "part"], 1: ["COMMIT", "part"]}}
    assert bytes(keepers.read(1, 3, "part", 5, 1000)) == content[5:1005]
    # Without a certificate it takes nothing, and says nothing of what it has.
    for client in Keepers.of({**told, "keepers": [{**keeper, "is_encrypted": False} for keeper in told["keepers"]]}, 0).clients:
        with pytest.raises(Exception, match=r"did not answer|refused"):
            client.call("held", deadline_s=20)
    # A pod that takes part no more keeps nothing, although its lease lasts.
    near.joined = list
    assert [keeper["name"] for keeper in near.describe()["memory"]["keepers"]] == ["home"]
    # A resume reads it all the same, and waits for none where every rank's files are in reach.
    said: list[str] = []
    near.say, near.expected, near.recorded = said.append, {0: {"a", "elsewhere"}}, 7
    told = near.describe(3, loads=True)
    assert [keeper["name"] for keeper in told["memory"]["keepers"]] == ["home", "a"] and said == []
    assert told["memory"]["incarnation"] == 3 and told["recorded"] == 7
    near.begun()
    assert near.describe(3)["recorded"] is None and [keeper["name"] for keeper in near.describe(3)["memory"]["keepers"]] == ["home"]


def test_no_second_copy_is_on_the_node_whose_state_it_is() -> None:
    keeper = {"host": "127.0.0.1", "port": 1, "is_encrypted": False}
    of = lambda own, *nodes: Keepers.of(
        {"credential": SECRET, "nodes": [own], "keepers": [{**keeper, "name": str(n), "node": node} for n, node in enumerate(nodes)]}, 0
    )  # fmt: skip
    assert of("a", "a").places == (0,)
    assert of("a", "a", "a").places == (0,), "two pods of one machine share its fate"
    assert of("a", "a", "a", "b", "c").places == (0, 2) and of("b", "a", "a", "b", "c").places == (2, 3) and of("c", "a", "b", "c").places == (2, 0)
    assert of("d", "a", "b").places == (0,), "a node without a keeper has one copy elsewhere"
    with pytest.raises(RunError, match="no memory takes the checkpoint of step 1"):
        of("a").put(1, {"part": b"x"})


def test_a_run_that_one_node_keeps_says_so_once_and_again_when_it_comes_to_be_so() -> None:
    said: list[str] = []
    alone, joining = NearTiers(say=said.append), NearTiers(say=said.append, open_store=lambda: open_store(""))
    for _ in range(5):
        alone.tell_of_nodes(1)
    assert len(said) == 1 and "kept by one node alone" in said[0]
    for nodes in (1, 1, 2, 1, 1):
        joining.tell_of_nodes(nodes)
    assert len(said) == 1, "others may be on their way"
    joining.tell_of_nodes(1)
    assert len(said) == 2


def test_a_resume_expects_the_keepers_of_other_machines_where_every_rank_has_one_and_the_folder_has_nothing_newer(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.set(NODE_KEY, "home")
        assert kept_elsewhere(tmp_path, journal) == {}
        record_written(journal, "memory", 4, 1, 0.1, {"home": [0], "a": [0, 1], "b": [1]})
        assert kept_elsewhere(tmp_path, journal) == {0: {"a"}, 1: {"a", "b"}}
        (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
        assert kept_elsewhere(tmp_path, journal) == {}
        record_written(journal, "memory", 6, 1, 0.1, {"home": [0, 1], "a": [0]})
        assert kept_elsewhere(tmp_path, journal) == {}, "what rank 1 had ended with the controller"


def test_a_resume_reads_the_keepers_of_its_launcher_that_answer_and_what_this_machine_has_had_before_and_waits_for_neither(tmp_path: Path) -> None:
    launched, said = KeeperProcess("node-2", tmp_path, SECRET, host="127.0.0.2"), list[str]()
    own = KeeperProcess("home", tmp_path, SECRET, host="127.0.0.3", kept_in=str(tmp_path / "kept"), run="run")
    try:
        write_keeper(tmp_path, launched.start())
        # Of a node that is lost: nothing listens there.
        with socket.socket() as probe:
            probe.bind(("127.0.0.4", 0))
            write_keeper(tmp_path, {"name": "node-3", "node": "127.0.0.4", "host": "127.0.0.4", "port": probe.getsockname()[1], "is_encrypted": False})
        facts = own.start()
        before = Keepers.of({"keepers": [facts], "credential": SECRET, "nodes": ["127.0.0.3"]}, 0)
        before.put(4, {"rank-00001.json": b"{}", "rank-00001.safetensors": b"data"})
        before.commit(4, {"COMMIT": b"whole"})
        own.close()
        own._worker = None
        near = NearTiers(own, 2, SECRET, expected={0: {"node-2"}, 1: {"node-3"}}, say=said.append, launched=lambda: launched_keepers(tmp_path))
        told = near.describe(1, loads=True)["memory"]["keepers"]
        assert [keeper["name"] for keeper in told] == ["home", "node-2"] and said == []
        assert own.held == {4: ["COMMIT", "rank-00001.json", "rank-00001.safetensors"]}
        # What is written goes to pods that take part.
        assert [keeper["name"] for keeper in near.describe(1)["memory"]["keepers"]] == ["home"]
        remove_keeper(tmp_path, launched.start())
        assert launched_keepers(tmp_path) == []
    finally:
        own.close()
        launched.close()
