"""Every listed family, with all terms that its tiny folder turns on, trains on each kind of mesh like one process."""

from dataclasses import replace
from typing import Any

import pytest
from listed_families import TINY, peer_config
from model_ranks import Case, Trained, by_one_process, check, distance, train
from pipeline_ranks import alone, gather_ranks, train_pipeline
from ranks import RankContext, Ranks

from tandem.config.parallel import ParallelConfig
from tandem.layout.mesh import MeshShape
from tandem.layout.mesh_check import check_layout
from tandem.layout.shapes import ModelShapes
from tandem.planner.model_sizes import model_sizes
from tandem.types import UserError

MESHES = {
    "data": {"data": 2}, "tensor": {"tensor": 2}, "tensor and sequence": {"tensor": 2}, "context": {"context": 2}, "expert": {"data": 2, "expert": 2},
}  # fmt: skip
BINS = ((0, 3), (1,), (4, 5), (2,), (6,))
"""Micro-batches of the pipeline by sequence."""
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.full]


def shapes_of(family: str) -> ModelShapes:
    """Returns the shapes of the family's tiny folder, with a number of experts that two ranks can divide."""
    shapes = model_sizes(peer_config(family, **{**TINY[family], "vocab_size": 40}).to_dict(), "config.json")
    experts = shapes.experts
    return shapes if experts is None else replace(shapes, experts=replace(experts, num_experts=experts.num_experts + experts.num_experts % 2))


def trained(here: RankContext, case: Case) -> Trained:
    return train(here, case)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", sorted(TINY))
def test_two_ranks_train_what_one_process_trains(family: str, mesh: str, ranks: Ranks) -> None:
    shapes = shapes_of(family)
    refused = (mesh == "expert" and shapes.experts is None) or ("tensor" in mesh and shapes.qk_norm_all_heads)
    if refused:
        with pytest.raises(UserError, match=rf"'parallel\.{mesh.split()[0]}' is 2; this {family} model has .*: leave it at 1"):
            check_layout(shapes, ParallelConfig(**MESHES[mesh]))
        return
    check_layout(shapes, ParallelConfig(**MESHES[mesh]))
    case = Case(shapes, sequence="sequence" in mesh, steps=2)
    check(ranks.run(MeshShape(**MESHES[mesh]), trained, case), by_one_process(case))


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_pipeline_of_two_stages_trains_what_one_process_trains(family: str, ranks: Ranks) -> None:
    case = Case(shapes_of(family), steps=2)
    found: list[dict[str, Any]] = ranks.run(MeshShape(pipeline=2), train_pipeline, case, BINS)
    wanted = alone(case, BINS)
    for name in ("gradients", "parameters"):
        assert distance(gather_ranks(found, name), wanted[name]) < 1e-10, name
    for rank in found:
        for name in ("losses", "norms"):
            assert rank[name] == pytest.approx(wanted[name], rel=1e-9)
