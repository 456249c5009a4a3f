"""The mesh and its collectives: the placement of ranks, and sums in rank order."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from ranks import RankContext, Ranks

from tandem.config.parallel import ParallelConfig
from tandem.layout.mesh import AXES, Mesh, MeshShape, crossing, smaller
from tandem.layout.placement import check_placement
from tandem.runtime.collectives.agreement import INLINE_BYTES, check_same_kernels, gather_values
from tandem.runtime.collectives.communicator import FEW_BYTES
from tandem.types import RunError, UserError

SHAPES = [MeshShape(), MeshShape(data=2, tensor=2), MeshShape(2, 2, 2), MeshShape(data=4, context=2, expert=4), MeshShape(3, 2, 2, 2, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*AXES, "tokens", "expert", "expert_data", "world"])
def test_the_groups_of_a_kind_part_the_world_between_them(shape: MeshShape, name: str) -> None:
    groups = {Mesh(shape, rank).group(name) for rank in range(shape.world)}
    assert Counter(rank for group in groups for rank in group) == Counter(range(shape.world))
    assert len({len(group) for group in groups}) == 1
    assert all(rank in Mesh(shape, rank).group(name) for rank in range(shape.world))


def test_tensor_parallel_ranks_are_neighbours_and_stages_lie_farthest_apart() -> None:
    mesh = Mesh(MeshShape(data=2, tensor=2, pipeline=2, context=2), 5)
    assert mesh.group("tensor") == (4, 5)
    assert mesh.group("context") == (5, 7)
    assert mesh.group("data") == (1, 5)
    assert mesh.group("pipeline") == (5, 13)


@pytest.mark.parametrize("shape", [MeshShape(data=2, expert=3), MeshShape(data=0), MeshShape(tensor=-1)])
def test_a_mesh_that_cannot_be_is_refused(shape: MeshShape) -> None:
    with pytest.raises(ValueError, match=r"expert|at least 1"):
        Mesh(shape, 0)


def collectives(here: RankContext, width: int) -> dict[str, torch.Tensor]:
    world = here.groups["world"]
    generator = torch.Generator().manual_seed(here.mesh.rank)
    x = torch.randn(world.size, width, generator=generator)
    counts = [(world.rank + to) % 3 for to in range(world.size)]
    rows = torch.arange(sum(counts)) + 100 * world.rank
    arriving = [(source + world.rank) % 3 for source in range(world.size)]
    sent = torch.full((3,), float(world.rank))
    world.broadcast(sent, 1, "a test")
    return {
        "x": x,
        "gathered": world.all_gather(x, "a test"),
        "scattered": world.reduce_scatter(x, "a test"),
        "reduced": world.all_reduce(x, "a test"),
        "exchanged": world.all_to_all(rows, counts, arriving, "a test"),
        "broadcast": sent,
    }


def test_sums_are_taken_in_rank_order_and_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: Ranks) -> None:
    found = ranks.run(MeshShape(data=3), collectives, 37)
    parts = [answer["x"] for answer in found]
    total = parts[0] + parts[1] + parts[2]
    for rank, answer in enumerate(found):
        assert torch.equal(answer["gathered"], torch.stack(parts))
        assert torch.equal(answer["scattered"], total[rank])
        assert torch.equal(answer["reduced"], total)
        assert torch.equal(answer["broadcast"], torch.ones(3))


def test_a_large_gather_which_goes_straight_to_its_place_has_every_ranks_rows_in_order(ranks: Ranks) -> None:
    width = FEW_BYTES // 4
    for size in (2, 3):
        found = ranks.run(MeshShape(data=size), collectives, width)
        for answer in found:
            assert answer["x"].nbytes > FEW_BYTES
            assert torch.equal(answer["gathered"], torch.stack([other["x"] for other in found]))


def two_sums(here: RankContext, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    world = here.groups["world"]
    x = torch.arange(float(width)) + here.mesh.rank
    first = world.all_reduce(x, "a test")
    return x, first, world.all_reduce(2 * first[: width - 2], "a test")


@pytest.mark.parametrize("width", [FEW_BYTES, FEW_BYTES + 1])
def test_a_large_sum_keeps_its_value_and_its_operand_when_the_next_is_taken(width: int, ranks: Ranks) -> None:
    total = 2 * torch.arange(float(width)) + 1
    for rank, (x, first, second) in enumerate(ranks.run(MeshShape(data=2), two_sums, width)):
        assert torch.equal(x, torch.arange(float(width)) + rank) and torch.equal(first, total) and torch.equal(second, 4 * total[: width - 2])


def values_of(here: RankContext, lengths: list[int]) -> list[str]:
    return gather_values(here.groups["data"], chr(ord("a") + here.mesh.rank) * lengths[here.mesh.rank], "values")


@pytest.mark.parametrize("lengths", [[0, 1], [INLINE_BYTES - 2, 3], [INLINE_BYTES - 1, 3], [0, INLINE_BYTES - 2], [3 * INLINE_BYTES, 2 * INLINE_BYTES + 5]])
def test_every_rank_is_told_the_value_of_each_whatever_their_lengths(ranks: Ranks, lengths: list[int]) -> None:
    # Quotation marks make a text two bytes longer.
    expected = ["a" * lengths[0], "b" * lengths[1]]
    assert ranks.run(MeshShape(data=2), values_of, lengths) == [expected, expected]


def kernels_of(here: RankContext, names: list[str]) -> str:
    try:
        check_same_kernels(here.groups["data"], names[here.mesh.rank])
    except RunError as error:
        return str(error)
    return ""


def test_ranks_that_compute_with_different_kernels_are_told_so_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.run(MeshShape(data=2), kernels_of, ["reference", "cpu"])
    assert first == second and "(rank 0 reference, rank 1 cpu)" in first
    assert ranks.run(MeshShape(data=2), kernels_of, ["cpu", "cpu"]) == ["", ""]


def test_rows_reach_the_rank_they_are_sent_to_none_included(ranks: Ranks) -> None:
    found = ranks.run(MeshShape(data=3), collectives, 2)
    for rank, answer in enumerate(found):
        rows = []
        for source in range(3):
            counts = [(source + to) % 3 for to in range(3)]
            first = sum(counts[:rank])
            rows += [100 * source + first + i for i in range(counts[rank])]
        assert answer["exchanged"].tolist() == rows


def test_axes_that_cross_nodes_follow_from_who_stands_where() -> None:
    shape = MeshShape(data=2, tensor=2, pipeline=2)
    assert crossing(shape, [0] * 8) == []
    assert crossing(shape, [0, 0, 1, 1, 2, 2, 3, 3]) == ["data", "pipeline"]
    assert crossing(shape, [0, 0, 0, 0, 1, 1, 1, 1]) == ["pipeline"]
    assert crossing(shape, [0, 1, 0, 1, 0, 1, 0, 1]) == ["tensor"]
    assert crossing(MeshShape(context=2, tensor=2), [0, 0, 1, 1]) == ["context"]
    assert crossing(MeshShape(data=4, context=3, tensor=2), [0] * 23 + [1]) == ["tensor", "context", "data"]
    with pytest.raises(ValueError, match="4 ranks have a node and the mesh has 8"):
        crossing(shape, [0] * 4)


def test_tensor_and_context_stay_inside_a_node_unless_it_is_asked_for() -> None:
    check_placement(ParallelConfig(data=4, tensor=2, ranks_per_node=2))
    for refused in (ParallelConfig(data=2, tensor=4, ranks_per_node=2), ParallelConfig(tensor=3, data=2, ranks_per_node=2)):
        with pytest.raises(UserError, match=r"'parallel.tensor' is \d.*several machines.*parallel.across_nodes"):
            check_placement(refused)
        check_placement(replace(refused, across_nodes=True))
    with pytest.raises(UserError, match=r"'parallel.context' is 2"):
        check_placement(ParallelConfig(context=2, tensor=2, ranks_per_node=2))


def test_mesh_loses_data_parallel_ranks_and_no_others() -> None:
    assert smaller(MeshShape(data=4, tensor=2)) == MeshShape(data=3, tensor=2)
    assert smaller(MeshShape(data=4, expert=2)) == MeshShape(data=2, expert=2)
    assert smaller(MeshShape(tensor=2)) is None and smaller(MeshShape(data=4, expert=4)) is None
