"""Checkpoints in the memory of two nodes, over real sockets: what is loaded has the bits that were saved, and what is damaged or lost is passed over for the
next copy, the next checkpoint and the folder, in this order."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.runtime.rpc.credentials import new_credential
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import MANIFEST
from tandem.trainer.checkpoint.memory import keeper as keeper_module
from tandem.trainer.checkpoint.memory.keeper import KEPT, Keeper
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import make_replica
from tandem.types import RunError

DATA = "rank-00000.safetensors"


class Nodes(NamedTuple):
    """``keepers`` by node, with the ``servers`` that answer for them, and ``reached``: as a rank on node 0 reaches them."""

    keepers: list[Keeper]
    servers: list[RpcServer]
    reached: Keepers


def keepers_at(servers: list[RpcServer], credential: str) -> dict[str, Any]:
    """Describes the keepers of ``servers`` on nodes of their own, for a rank on each."""
    keepers = [{"name": str(n), "node": str(n), "host": "127.0.0.1", "port": server.port, "is_encrypted": False} for n, server in enumerate(servers)]
    return {"keepers": keepers, "credential": credential, "nodes": [keeper["node"] for keeper in keepers]}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    credential, keepers = new_credential(), [Keeper(), Keeper()]
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(RpcServer(keeper.methods(), credential, name="memory"))) for keeper in keepers]
        for server in servers:
            server.start()
        yield Nodes(keepers, servers, Keepers.of(keepers_at(servers, credential), 0))


class Run:
    """A model whose weights after N steps are all N, and its checkpoints."""

    def __init__(self, make_model: Callable[..., Decoder], folder: Path, memory: Keepers) -> None:
        trainer, ranks = TrainerConfig(learning_rate=1e-3), alone()
        self.model = make_model(torch.float32)
        replica = make_replica(self.model, trainer, ranks)
        self.checkpoints = ReplicaCheckpoints(
            folder / "checkpoints", 2, folder, ReplicaState(replica), GradScaler(trainer), ranks.world, asynchronous=False, memory=memory
        )

    def take(self, step: int) -> dict[str, int]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        return {"steps": step}

    def load(self) -> int | None:
        """Loads the newest checkpoint and returns its step, which all weights must be."""
        self.take(-1)
        found = self.checkpoints.load()
        if found is not None:
            assert all(bool((parameter == found.step).all()) for parameter in self.model.parameters())
        return None if found is None else found.step


@pytest.fixture
def run(make_model: Callable[..., Decoder], tmp_path: Path, nodes: Nodes) -> Run:
    """Has the checkpoint of step 1 in its folder, and those of steps 2, 3 and 4 in memory."""
    run = Run(make_model, tmp_path, nodes.reached)
    run.checkpoints.save(1, run.take(1))
    for step in (2, 3, 4):
        run.checkpoints.copy(step, run.take(step), {"memory"})
    return run


def tier(run: Run) -> str:
    assert run.checkpoints.opened is not None
    return run.checkpoints.opened.tier


def damage(nodes: Nodes, node: int, step: int, name: str = DATA) -> None:
    nodes.keepers[node].files[step][name][-1] ^= 1


def test_the_newest_checkpoint_in_memory_is_loaded_from_the_own_node_and_no_more_than_two_are_kept_on_each(run: Run, nodes: Nodes) -> None:
    assert run.load() == 4 and run.checkpoints.damaged == []
    assert run.checkpoints.opened is not None and run.checkpoints.opened.where[DATA] == "0"
    assert all(keeper.committed == [3, 4] and len(keeper.committed) == KEPT for keeper in nodes.keepers)
    assert run.checkpoints.last == 1, "it is none of the folder's"


@pytest.mark.parametrize("name", [DATA, "rank-00000.json"])
def test_a_damaged_copy_is_passed_over_for_that_of_the_peer_and_named(name: str, run: Run, nodes: Nodes) -> None:
    damage(nodes, 0, 4, name)
    assert run.load() == 4
    assert run.checkpoints.opened is not None and run.checkpoints.opened.where[DATA] == "1"
    [why] = run.checkpoints.damaged
    assert name in why and "memory of node 0" in why


def test_a_checkpoint_whose_copies_are_all_damaged_is_passed_over_for_the_one_before(run: Run, nodes: Nodes) -> None:
    damage(nodes, 0, 4)
    damage(nodes, 1, 4)
    assert run.load() == 3 and "no node has a whole copy" in run.checkpoints.damaged[-1]


@pytest.mark.parametrize("lost", ["damaged", "not committed", "nodes are gone"])
def test_without_a_whole_one_in_memory_that_of_the_folder_is_loaded(lost: str, run: Run, nodes: Nodes) -> None:
    for node, keeper in enumerate(nodes.keepers):
        for step in keeper.committed:
            if lost == "damaged":
                damage(nodes, node, step)
            elif lost == "not committed":
                del keeper.files[step][MARKER]
        if lost == "nodes are gone":
            nodes.servers[node].close()
    assert run.load() == 1 and tier(run) == "folder" and run.checkpoints.last == 1


def test_a_manifest_that_its_marker_does_not_name_is_none(run: Run, nodes: Nodes) -> None:
    for node in (0, 1):
        damage(nodes, node, 4, MANIFEST)
    assert run.load() == 3


def test_a_checkpoint_of_the_folder_is_in_memory_too_and_newer_than_all_there_where_no_memory_took_it(run: Run, nodes: Nodes) -> None:
    run.checkpoints.save(5, run.take(5))
    assert run.load() == 5 and tier(run) == "memory"
    for keeper in nodes.keepers:
        del keeper.files[5]
    assert run.load() == 5 and tier(run) == "folder"


def test_with_the_memory_of_one_node_a_checkpoint_is_saved_and_loaded_from_the_other(run: Run, nodes: Nodes) -> None:
    nodes.servers[0].close()
    run.checkpoints.copy(6, run.take(6), {"memory"})
    assert run.load() == 6 and nodes.keepers[1].committed == [4, 6] and nodes.keepers[0].committed == [3, 4]


def test_a_node_without_memory_for_a_file_takes_none_and_keeps_what_it_has(run: Run, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    run.checkpoints.take_written()
    monkeypatch.setattr(keeper_module, "available_bytes", lambda limit: 1000)
    run.checkpoints.copy(6, run.take(6), {"memory"})
    [left_out] = run.checkpoints.take_written()
    assert left_out.tier == "memory" and left_out.trouble
    assert run.load() == 4 and nodes.keepers[0].committed == nodes.keepers[1].committed == [3, 4]


def test_where_no_keeper_answers_the_tier_is_left_out_with_one_line_and_the_folder_goes_on(run: Run, nodes: Nodes) -> None:
    run.checkpoints.take_written()
    for server in nodes.servers:
        server.close()
    for step in (6, 7):
        run.checkpoints.save(step, run.take(step))
    left_out, *written = run.checkpoints.take_written()
    assert left_out.tier == "memory" and left_out.step == 6 and "the keepers of nodes 0, 1 do not answer" in left_out.trouble
    assert [(each.tier, each.step, each.trouble) for each in written] == [("folder", 6, ""), ("folder", 7, "")]
    assert run.load() == 7 and tier(run) == "folder"


def test_checkpoints_that_are_not_trusted_are_dropped(run: Run, nodes: Nodes) -> None:
    for keeper in nodes.keepers:
        keeper.drop_after({"step": 3}, {}, lambda progress: None)
    assert run.load() == 3


def test_what_another_run_has_kept_is_neither_read_nor_left_in_the_way(run: Run, nodes: Nodes) -> None:
    other = replace(nodes.reached, caller={"of": "other", "incarnation": 1})
    assert other.held() == {}
    with pytest.raises(RunError, match=f"it has no '{DATA}' of step 4"):
        other.read(0, 4, DATA)
    assert run.load() == 4, "nothing was lost by the look"
    other.put(1, {"part": b"x"})
    other.commit(1, {MARKER: b"whole"})
    assert other.held() == {1: {0: [MARKER, "part"], 1: [MARKER, "part"]}} and nodes.reached.held() == {}
    assert run.load() == 1 and tier(run) == "folder"


def test_a_trainer_that_was_replaced_writes_nothing_over_what_the_next_one_has(nodes: Nodes) -> None:
    first, second = (replace(nodes.reached, caller={"of": "run", "incarnation": incarnation}) for incarnation in (1, 2))
    first.put(3, {"part": b"a"})
    assert second.held() == {}
    with pytest.raises(RunError, match="no memory takes the checkpoint of step 3"):
        first.put(3, {"part": b"b"})
    with pytest.raises(RunError, match="no memory commits the checkpoint of step 3"):
        first.commit(3, {MARKER: b"whole"})
    second.put(3, {"part": b"c"})
    second.commit(3, {MARKER: b"whole"})
    assert bytes(first.read(0, 3, "part")) == b"c"


def test_a_checkpoint_of_a_step_whose_rows_were_lost_is_none(run: Run) -> None:
    for recorded, expected in ((4, 4), (3, 3), (2, 1), (None, 4)):
        run.checkpoints.recorded = recorded
        assert run.load() == expected
