"""What a launcher sets in the recipe of a run on data for its nodes, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.launch.several_nodes import for_nodes
from tandem.types import UserError

DATA: dict[str, Any] = {"algorithm": {"name": "dpo"}, "parallel": {"data": 8}}


def values(nodes: int, **sections: Any) -> tuple[list[str], bool]:
    return for_nodes({**DATA, **sections}, Path("/runs/text"), lambda data: (nodes, "slurm.nodes"), etcd_is_here=False)


def test_every_node_that_is_no_spare_has_ranks() -> None:
    given = ["--coordination.store=etcd", "--pods.max_count=4", "--pods.trainer_count=4", '--pods.credential_file="/runs/text/launch/pods.secret"']
    assert values(4) == values(5, cluster={"spares": 1}) == (given, True)
    own = {"trainer_count": 2, "credential_file": "/secret"}
    assert values(4, pods=own, coordination={"store": "etcd"}) == (["--coordination.store=etcd", "--pods.max_count=2", "--pods.trainer_count=2"], False)
    assert values(1) == ([], False)


def test_nodes_of_which_there_are_several_for_a_replica_have_its_stages() -> None:
    given = ["--coordination.store=etcd", "--pods.max_count=4", "--pods.trainer_count=4", '--pods.credential_file="/runs/text/launch/pods.secret"']
    assert values(5, parallel={"data": 2, "pipeline": 4}, cluster={"spares": 1}) == (given, True)
    with pytest.raises(UserError, match=(
        r"^'slurm.nodes' is 4 and 'parallel.data' 2, which 4 nodes with ranks do not divide; set parallel.data to a multiple of 4, or parallel.pipeline to a "
        r"multiple of 2, whose stages are then on 2 machines$"
    )):  # fmt: skip
        values(4, parallel={"data": 2, "pipeline": 3})


@pytest.mark.parametrize(("nodes", "spares"), [(1, 0), (3, 1)])
def test_more_pods_that_train_than_nodes_are_refused(nodes: int, spares: int) -> None:
    with pytest.raises(UserError, match=rf"^'pods.trainer_count' is 3, and {nodes - spares} of the nodes can train .*; lower it, or raise slurm.nodes$"):
        values(nodes, pods={"trainer_count": 3}, cluster={"spares": spares})
